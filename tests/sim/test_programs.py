"""Programs as others write them for boards and cards run on the software device, unchanged.

Each runs in a process of its own, as `python -m runtime_cache.aclsim run PROGRAM` does it, and what
it computes is compared with numpy. They say `import acl` and know nothing of this project.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from om_models.bundle import Bundle
from tests.support.programs import (
    BOARD,
    CARD,
    PROGRAMS,
    ROOT,
    Ended,
    answer,
    any_shape,
    board_llm,
    classifier,
    classify,
    compile_model,
    difference,
    pictures,
    run_program,
    token_major_gears,
    token_major_llm,
)

STATIC = "--input_shape=picture:1,3,8,8"


@pytest.fixture(scope="module")
def om(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of one picture at a time, for a card."""
    return compile_model(classifier(), tmp_path_factory.mktemp("om"), STATIC)


@pytest.fixture(scope="module")
def board_om(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a board."""
    return compile_model(classifier(), tmp_path_factory.mktemp("om"), STATIC, soc=BOARD)


def clean(ended: Ended) -> None:
    """It ended well, and did nothing that a card would not forgive."""
    assert (ended.code, ended.misuses) == (0, []), ended.err


def run_on_pictures(
    name: str, om: Path, directory: Path, *args: str, count: int = 4, soc: str = CARD
) -> Ended:
    """Runs a program on so many pictures, and compares what it saves."""
    inputs, outputs = directory / "pictures.npy", directory / "scores.npy"
    given = pictures(count)
    np.save(inputs, given[:, None] if name == "classify.py" else given)
    ended = run_program(name, om, inputs, outputs, *args, soc=soc)
    assert ended.code == 0, ended.err
    scores = np.load(outputs).reshape(count, -1)
    np.testing.assert_allclose(scores, classify(given), rtol=1e-5, atol=1e-5)
    return ended


def test_no_program_knows_this_project() -> None:
    for path in PROGRAMS.rglob("*.py"):
        text = path.read_text("utf-8")
        assert "import acl\n" in text or "from one_model import" in text, path
        assert "runtime_cache" not in text, path


@pytest.mark.parametrize("soc", [CARD, BOARD])
def test_the_compiler_and_a_program(tmp_path: Path, soc: str) -> None:
    onnx.save_model(classifier(), tmp_path / "net.onnx")
    atc = [sys.executable, "-m", "runtime_cache.aclsim", "atc", "--framework=5", STATIC]
    names = [f"--model={tmp_path}/net.onnx", f"--output={tmp_path}/net", f"--soc_version={soc}"]
    done = subprocess.run([*atc, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "acl.json").write_text(json.dumps({"err_msg_mode": "0"}))
    config = ("--config", str(tmp_path / "acl.json"))
    clean(run_on_pictures("classify.py", tmp_path / "net.om", tmp_path, *config, soc=soc))


def test_helpers_that_are_to_be_removed(om: Path, tmp_path: Path) -> None:
    ended = run_on_pictures("classify.py", om, tmp_path, "--old-helpers")
    clean(ended)
    assert "Warning: acl.util.numpy_to_ptr" in ended.err
    assert "Warning: acl.util.ptr_to_numpy" in ended.err


@pytest.mark.parametrize("how", [(), ("--python-thread",), ("--every", "3")], ids=str)
def test_callbacks(om: Path, tmp_path: Path, how: Sequence[str]) -> None:
    clean(run_on_pictures("callbacks.py", om, tmp_path, *how, count=7))


@pytest.mark.parametrize("soc", [CARD, BOARD])
def test_every_way_of_loading(om: Path, board_om: Path, tmp_path: Path, soc: str) -> None:
    np.save(tmp_path / "in.npy", pictures(1))
    path = om if soc == CARD else board_om
    ended = run_program("loads.py", path, tmp_path / "in.npy", tmp_path / "out.npy", soc=soc)
    clean(ended)
    for row in np.load(tmp_path / "out.npy"):
        np.testing.assert_allclose(row, classify(pictures(1))[0], rtol=1e-5, atol=1e-5)
    taken = [int(line.split(": ")[1].split()[0]) for line in ended.out.splitlines()]
    # The first two take memory of the device's, the last two use what they were given.
    assert taken[0] == taken[1] > 0 == taken[2] == taken[3]


def test_a_language_model_with_gears(tmp_path: Path) -> None:
    flags = token_major_gears(fed=(1, 2, 4), past=(16, 32))
    path = compile_model(token_major_llm(), tmp_path, *flags)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    np.save(tmp_path / "prompt.npy", prompt)
    # 11 tokens are fed as 4, 4, 2 and 1; the 17th token needs the longer past.
    clean(run_program("gear_llm.py", path, tmp_path / "prompt.npy", tmp_path / "out.npy", "12"))
    assert np.load(tmp_path / "out.npy").tolist() == answer(prompt, 12)


def test_a_language_model_on_a_board(tmp_path: Path) -> None:
    shapes = "--input_shape=input_ids:1,1;attention_mask:1,33;past:2,2,1,1,32,4"
    path = compile_model(board_llm(32), tmp_path, shapes, soc=BOARD)
    prompt = [3, 1, 4, 1, 5, 9, 2]
    np.save(tmp_path / "prompt.npy", prompt)
    out = tmp_path / "out.npy"
    clean(run_program("board_llm.py", path, tmp_path / "prompt.npy", out, "12", soc=BOARD))
    assert np.load(out).tolist() == answer(prompt, 12)
    ended = run_program("board_llm.py", path, tmp_path / "prompt.npy", out, "12", soc=CARD)
    assert ended.code == 1
    assert "for boards whose host and device share one memory" in ended.err


def test_batches(tmp_path: Path) -> None:
    flags = ("--input_shape=picture:-1,3,8,8", "--dynamic_batch_size=1,2,8")
    path = compile_model(classifier("B"), tmp_path, *flags)
    ended = run_on_pictures("batches.py", path, tmp_path, count=13)
    clean(ended)
    assert ended.out.splitlines() == ["batch sizes: 1 2 8"]


@pytest.mark.parametrize("shape", ["-1,-1", "1~9,2~8"])
def test_shapes_of_each_run(tmp_path: Path, shape: str) -> None:
    path = compile_model(any_shape(), tmp_path, f"--input_shape=x:{shape}")
    arrays = [
        np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        for rows, columns in ((2, 3), (9, 2), (1, 8))
    ]
    files = [tmp_path / f"{index}.npy" for index in range(len(arrays))]
    for file, array in zip(files, arrays, strict=True):
        np.save(file, array)
    ended = run_program("shapes.py", path, tmp_path / "out.npz", *files)
    clean(ended)
    assert ended.out.splitlines() == ["shape of the input: -1 -1"]
    found = np.load(tmp_path / "out.npz")
    for name, array in zip(found.files, arrays, strict=True):
        np.testing.assert_array_equal(found[name], 2 * array.T)


def test_two_streams_and_two_buffers(om: Path, tmp_path: Path) -> None:
    clean(run_on_pictures("streaming.py", om, tmp_path, count=9))


def test_models_that_feed_each_other(om: Path, tmp_path: Path) -> None:
    shapes = "--input_shape=left:1,10;right:1,10"
    head = compile_model(difference(), tmp_path, shapes)
    left, right = pictures(5), pictures(5, seed=4)
    files = [tmp_path / name for name in ("left.npy", "right.npy", "results.npy")]
    np.save(files[0], left)
    np.save(files[1], right)
    clean(run_program("branches.py", om, head, *files))
    expected = classify(left) - classify(right)
    np.testing.assert_allclose(np.load(files[2]), expected, rtol=1e-4, atol=1e-4)


def test_runs_with_limits_on_their_time(om: Path, tmp_path: Path) -> None:
    clean(run_on_pictures("limits.py", om, tmp_path, count=1))


def test_several_threads(om: Path, tmp_path: Path) -> None:
    clean(run_on_pictures("threads.py", om, tmp_path, "3", count=12))


@pytest.mark.parametrize("name", ["callbacks.py", "streaming.py", "threads.py"])
def test_the_same_on_a_board(board_om: Path, tmp_path: Path, name: str) -> None:
    clean(run_on_pictures(name, board_om, tmp_path, soc=BOARD))


OURS = """
import sys
from runtime_cache import LLM
model = LLM(sys.argv[1], device="sim:0")
for prompt in ("a common beginning, one end", "a common beginning, another end"):
    print(model.generate(prompt, max_tokens=8, temperature=0).usage.cached_tokens)
model.close()
"""


def test_our_own_driver_does_nothing_that_a_card_would_not_forgive(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    (tmp_path / "ours.py").write_text(OURS, "utf-8")
    ended = run_program(tmp_path / "ours.py", tiny_bundle.path)
    clean(ended)
    # The first token of a prompt is <s>.
    assert ended.out.split() == ["0", str(1 + len("a common beginning, "))]
