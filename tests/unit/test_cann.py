"""Finding the user's CANN, its environment, its release, its Python: on fabricated trees."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from om_models import cann
from om_models.atc_table import Release
from om_models.cann import (
    PYTHON_MODULES,
    check_python,
    find_cann,
    find_set_env,
    missing_modules,
    python_notes,
    read_release,
    scrubbed,
)
from runtime_cache.errors import ConversionError
from tests.support.cann_tree import CannTree

#: The programs a shell needs, and no atc.
PATH = "/usr/bin:/bin"


@pytest.fixture
def tree(tmp_path: Path) -> CannTree:
    return CannTree(tmp_path / "usr")


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual places of this machine are not looked at."""
    places = tuple(f"{tmp_path}/nowhere{p}" for p in cann.WELL_KNOWN if p.startswith("/"))
    monkeypatch.setattr(cann, "WELL_KNOWN", (*places, *cann.WELL_KNOWN[2:]))


# --- where it is ----------------------------------------------------------------------------------


def test_the_users_choice(tree: CannTree, tmp_path: Path):
    other = CannTree(tmp_path / "other")
    environ = {"PATH": PATH, "ASCEND_TOOLKIT_HOME": str(other.home)}
    found = find_cann(tree.home, environ)
    assert (found.home, found.atc) == (tree.home, tree.home / "bin" / "atc")
    assert found.describe() == f"CANN 8.1.RC1, {tree.home}"


@pytest.mark.parametrize("name", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_what_the_shell_has_sourced(tree: CannTree, name: str):
    assert find_cann(environ={"PATH": PATH, name: str(tree.home)}).home == tree.home


def test_the_home_path_goes_before_the_older_name(tree: CannTree, tmp_path: Path):
    newer = CannTree(tmp_path / "newer", layout="8.5", release="8.5.0")
    environ = {"ASCEND_TOOLKIT_HOME": str(tree.home), "ASCEND_HOME_PATH": str(newer.home)}
    assert find_cann(environ={"PATH": PATH, **environ}).home == newer.home


@pytest.mark.parametrize("layout", ["8.x", "8.5"])
def test_a_users_own_installation_lies_in_the_home_directory(tmp_path: Path, layout: str):
    tree = CannTree(tmp_path / "home" / "Ascend", layout=layout)  # type: ignore[arg-type]
    assert find_cann(environ={"PATH": PATH, "HOME": str(tmp_path / "home")}).home == tree.home


def test_an_atc_on_the_path_is_that_of_its_installation(tree: CannTree):
    found = find_cann(environ={"PATH": f"{tree.home}/bin:{PATH}"})
    assert found.home == tree.home
    assert found.environment["ASCEND_OPP_PATH"] == f"{tree.home}/opp"


def test_the_directory_that_holds_the_installation(tree: CannTree):
    found = find_cann(tree.home.parent, {"PATH": PATH})
    assert (found.home, found.release) == (tree.home, Release(8, 1))


def test_an_atc_on_the_path_without_set_env_runs_in_the_present_environment(tree: CannTree):
    tree.set_env.unlink()
    environ = {"PATH": f"{tree.home}/bin:{PATH}", "COLOUR": "blue"}
    found = find_cann(environ=environ)
    assert (found.atc, found.home) == (tree.home / "bin" / "atc", tree.home)
    assert found.environment == environ
    assert found.release == Release(8, 1)


def test_an_atc_that_belongs_to_nothing(tmp_path: Path):
    program = tmp_path / "tools" / "bin" / "atc"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    found = find_cann(environ={"PATH": str(program.parent)})
    assert (found.home, found.release) == (None, None)
    assert found.describe() == f"CANN, release not known, {program}"


# --- what is missing ------------------------------------------------------------------------------


def test_nothing_at_all():
    with pytest.raises(ConversionError, match=r"source set_env\.sh of CANN or name .* by --cann"):
        find_cann(environ={"PATH": PATH, "HOME": "/nowhere"})


def test_a_directory_that_is_none(tmp_path: Path):
    with pytest.raises(ConversionError, match=r"holds no set_env\.sh: it is not a CANN"):
        find_cann(tmp_path, {"PATH": PATH})


def test_an_installation_without_the_compiler(tree: CannTree):
    (tree.home / "bin" / "atc").unlink()
    with pytest.raises(ConversionError, match=r"puts no atc on the PATH: the CANN toolkit"):
        find_cann(tree.home, {"PATH": PATH})


def test_a_script_that_fails(tree: CannTree):
    tree.set_env.write_text("echo where is everything >&2\nexit 7\n")
    with pytest.raises(ConversionError, match="fails with exit code 7: where is everything"):
        find_cann(tree.home, {"PATH": PATH})


def test_a_script_whose_last_test_is_false(tree: CannTree):
    with tree.set_env.open("a") as script:
        script.write("[ -f /nowhere/more.sh ] && . /nowhere/more.sh\n")
    assert find_cann(tree.home, {"PATH": PATH}).atc == tree.home / "bin" / "atc"


def test_a_script_that_leaves_no_path(tree: CannTree):
    tree.set_env.write_text("echo no driver >&2\nunset PATH\n")
    with pytest.raises(ConversionError, match=r"puts no atc on the PATH.*\nit said: no driver"):
        find_cann(tree.home, {"PATH": PATH})


def test_variables_of_an_installation_that_is_gone():
    with pytest.raises(ConversionError, match=r"no set_env\.sh where ASCEND_HOME_PATH=/gone says"):
        find_cann(environ={"PATH": PATH, "HOME": "/nowhere", "ASCEND_HOME_PATH": "/gone"})


# --- the environment ------------------------------------------------------------------------------


def test_the_environment_is_that_of_a_clean_shell(tree: CannTree):
    environ = {"PATH": PATH, "HOME": "/home/me", "COLOUR": "blue", "ASCEND_WORK_PATH": "/scratch"}
    found = find_cann(tree.home, environ).environment
    assert "COLOUR" not in found
    assert (found["HOME"], found["ASCEND_WORK_PATH"]) == ("/home/me", "/scratch")
    assert found["ASCEND_OPP_PATH"] == f"{tree.home}/opp"
    assert found["PATH"] == f"{tree.home}/bin:{PATH}"


def test_the_environment_to_the_last_variable(tree: CannTree):
    environ = {"PATH": PATH, "HOME": "/home/me", "LD_LIBRARY_PATH": "/opt/lib", "EDITOR": "ed"}
    found = dict(find_cann(tree.home, environ).environment)
    for name in ("PWD", "OLDPWD", "SHLVL", "_"):  # the shell's own
        found.pop(name, None)
    assert found == {
        "HOME": "/home/me",
        "PATH": f"{tree.home}/bin:{PATH}",
        "LD_LIBRARY_PATH": f"{tree.home}/lib64:/opt/lib",
        "PYTHONPATH": f"{tree.home}/python/site-packages:",
        "ASCEND_HOME_PATH": str(tree.home),
        "ASCEND_TOOLKIT_HOME": str(tree.home),
        "ASCEND_OPP_PATH": f"{tree.home}/opp",
    }


def test_our_virtual_environment_stays_outside(tree: CannTree, tmp_path: Path):
    environ = {
        "PATH": f"{tmp_path}/venv/bin:{sys.prefix}/bin:{PATH}",
        "PYTHONPATH": f"{tmp_path}/venv/lib:{tmp_path}/venvs:/opt/mine",
        "PYTHONHOME": str(tmp_path),
        "VIRTUAL_ENV": f"{tmp_path}/venv",
    }
    clean = scrubbed(environ)
    assert clean == {"PATH": PATH, "PYTHONPATH": f"{tmp_path}/venvs:/opt/mine"}
    found = find_cann(tree.home, environ).environment
    assert not {"VIRTUAL_ENV", "PYTHONHOME"} & found.keys()
    assert "venv/" not in found["PATH"] + found["PYTHONPATH"]
    assert found["PYTHONPATH"].startswith(f"{tree.home}/python/site-packages")


def test_a_host_without_the_driver_gets_the_stubs(tree: CannTree):
    stubs = tree.home / "aarch64-linux" / "devlib"
    stubs.mkdir()
    found = find_cann(tree.home, {"PATH": PATH}).environment
    assert found["LD_LIBRARY_PATH"].split(":") == [f"{tree.home}/lib64", str(stubs)]


def test_a_host_with_the_driver_does_not(tree: CannTree, tmp_path: Path):
    (tree.home / "aarch64-linux" / "devlib").mkdir()
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "libascend_hal.so").touch()
    environ = {"PATH": PATH, "LD_LIBRARY_PATH": str(tmp_path / "driver")}
    found = find_cann(tree.home, environ).environment
    assert found["LD_LIBRARY_PATH"] == f"{tree.home}/lib64:{tmp_path}/driver"


# --- set_env.sh and release -----------------------------------------------------------------------


def test_set_env_under_the_processors_directory(tree: CannTree):
    inner = tree.home / "aarch64-linux" / "script" / "set_env.sh"
    inner.parent.mkdir()
    inner.write_text("")
    assert find_set_env(tree.home) == tree.set_env
    tree.set_env.unlink()
    assert find_set_env(tree.home) == inner


def test_a_set_env_beside_anything_is_not_taken(tmp_path: Path):
    (tmp_path / "set_env.sh").touch()
    (tmp_path / "project").mkdir()
    assert find_set_env(tmp_path / "project") is None


@pytest.mark.parametrize(
    ("name", "text", "release"),
    [
        ("aarch64-linux/ascend_toolkit_install.info", "version=8.5.0\n", (8, 5)),
        ("x86_64-linux/ascend_toolkit_install.info", "arch=x\nversion=9.0.0-beta1\n", (9, 0)),
        (
            "version.cfg",
            "# version: 1.0\ntoolkit_running_version=[7.7.0.1.238:8.1.RC1]\n",
            (8, 1),
        ),
        ("compiler/version.info", "Version=7.7.0.1.238\nversion_dir=8.1.RC1\n", (8, 1)),
    ],
)
def test_where_the_release_stands(tmp_path: Path, name: str, text: str, release: tuple[int, int]):
    path = tmp_path / "latest" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = read_release(tmp_path / "latest")
    assert found is not None
    assert (found.major, found.minor) == release


@pytest.mark.parametrize(
    ("name", "release"), [("8.1.RC1", "8.1.RC1"), ("cann-8.5.0", "8.5.0"), ("latest", None)]
)
def test_the_directorys_name_is_the_last_resort(tmp_path: Path, name: str, release: str | None):
    (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / name)
    found = read_release(tmp_path / "link")
    assert (found and str(found)) == release


# --- its Python -----------------------------------------------------------------------------------


def test_a_python_that_has_everything(tree: CannTree):
    check_python(find_cann(tree.home, {"PATH": PATH}))


@pytest.mark.parametrize("name", ["decorator", "google.protobuf", "yaml"])
def test_a_package_that_is_missing_is_named(tree: CannTree, name: str):
    shutil.rmtree(tree.modules.joinpath(*name.split(".")))
    found = find_cann(tree.home, {"PATH": PATH})
    assert missing_modules(found.environment) == [PYTHON_MODULES[name]]
    with pytest.raises(ConversionError) as caught:
        check_python(found)
    said = caught.value.message
    assert said.startswith(f"ATC compiles with {tree.home}/bin/python3 (")
    assert f", which lacks: {PYTHON_MODULES[name]}\n" in said
    assert "-m pip install" in said
    assert "--no-python-check" in said


def test_a_package_that_does_not_import_counts_as_missing(tree: CannTree):
    (tree.modules / "scipy" / "__init__.py").write_text("raise ImportError('libgfortran')")
    (tree.modules / "psutil" / "__init__.py").write_text("raise SystemExit('no such platform')")
    (tree.modules / "numpy" / "__init__.py").write_text("print('attr')")
    assert missing_modules(find_cann(tree.home, {"PATH": PATH}).environment) == [
        "scipy",
        "psutil",
    ]


def test_a_slow_python_is_believed(tree: CannTree, monkeypatch: pytest.MonkeyPatch):
    shutil.rmtree(tree.modules / "numpy")
    (tree.modules / "decorator" / "__init__.py").write_text("import signal; signal.pause()")
    monkeypatch.setattr(cann, "PYTHON_CHECK_S", 1.0)
    missing = missing_modules(find_cann(tree.home, {"PATH": PATH}).environment)
    assert missing in (["numpy"], []), "what was found in time; nothing on a very busy machine"


def test_no_python_at_all(tree: CannTree):
    found = find_cann(tree.home, {"PATH": PATH})
    with pytest.raises(ConversionError, match="ATC needs a python3"):
        missing_modules({**found.environment, "PATH": str(tree.modules)})


def test_a_python_that_does_not_start(tree: CannTree):
    (tree.home / "bin" / "python3").write_text("#!/bin/sh\necho no libpython >&2\nexit 3\n")
    with pytest.raises(ConversionError, match=r"does not start: no libpython$"):
        missing_modules(find_cann(tree.home, {"PATH": PATH}).environment)


@pytest.mark.parametrize(
    ("release", "version", "is_noted"),
    [
        ("8.0.0", "3 11", False),
        ("8.0.0", "3 12", True),
        ("8.5.0", "3 13", False),
        ("8.5.0", "3 6", True),
        ("8.1.RC1", "3 99", False),  # no page was read
    ],
)
def test_the_version_of_python(tmp_path: Path, release: str, version: str, *, is_noted: bool):
    tree = CannTree(tmp_path / "usr", release=release)
    (tree.home / "bin" / "python3").write_text(f"#!/bin/sh\necho {version}\n")
    notes = list(python_notes(find_cann(tree.home, {"PATH": PATH})))
    assert bool(notes) is is_noted
    if notes:
        assert f"CANN {release} names 3.7 to" in notes[0]
