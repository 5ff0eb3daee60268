"""Whole programs on the embedded API: those of the article on ATB's prefix caching, and how
programs end.

The article's programs stand here word by word. What is changed to run them: the import line, the
model's path, and the device where one is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.embedded import make_brief_bundle
from tests.support.rtcached import PATIENCE_S

#: Explicit prefixes.
EXPLICIT = """
from atb import LLM, PrefixCachingConfig

model = LLM(
    "meta-llama/Llama-2-7b-hf",
    device="npu:0",
    prefix_caching=PrefixCachingConfig(
        enable=True,
        max_prefix_length=4096,  # 最大缓存前缀长度
        cache_capacity=48,  # KV Cache 显存上限（GB）
    ),
)

system_prompt = "你是一个专业的AI助手，请用中文回答问题。以下是几个示例：\\n示例1: ...\\n示例2: ..."

# 把系统提示注册为前缀
prefix_id = model.register_prefix(system_prompt)

# 推理时指定前缀 ID
result = model.generate(
    "请解释什么是昇腾NPU",
    prefix_id=prefix_id,  # 自动复用系统提示的 KV Cache
)
"""

#: Automatic detection.
AUTOMATIC = """
from atb import LLM, PrefixCachingConfig

model = LLM(
    "meta-llama/Llama-2-7b-hf",
    device="npu:0",
    prefix_caching=PrefixCachingConfig(
        enable=True,
        auto_detect=True,  # 自动检测公共前缀
    ),
)

# 这两个请求会自动复用公共前缀
result1 = model.generate("系统：你是AI助手\\n用户：什么是CANN")
result2 = model.generate("系统：你是AI助手\\n用户：什么是Ascend C")
# "系统：你是AI助手\\n" 是公共前缀，只计算一次
"""

#: The life of a cached prefix; goes on from `EXPLICIT`, whose `model_id` the article leaves out.
LIFE = """
# 注册前缀（永久缓存，直到手动释放）
prefix_id = model.register_prefix(system_prompt)

# 使用前缀
result = model.generate("问题", prefix_id=prefix_id)

# 释放前缀（显存不够时）
model.release_prefix(prefix_id)

# LRU 策略：自动淘汰最久未用的前缀
model_id = "meta-llama/Llama-2-7b-hf"
model = LLM(
    model_id,
    prefix_caching=PrefixCachingConfig(
        enable=True,
        eviction_policy="lru",  # LRU 淘汰策略
        max_cached_prefixes=64,  # 最多缓存 64 个前缀
    ),
)
"""

#: Conversations; goes on from `LIFE`.
CHAT = """
# ATB 自动处理多轮对话的前缀复用
messages = [
    {"role": "system", "content": system_prompt},
    {"role": "user", "content": "什么是CANN？"},
]

# 每轮对话自动复用之前的 KV Cache
result1 = model.chat(messages)
messages.append({"role": "assistant", "content": result1})
messages.append({"role": "user", "content": "它和CUDA是什么关系？"})
result2 = model.chat(messages)  # 自动复用前缀
"""

#: Prints what each result so far has used.
USAGE = """
import json, msgspec
found = {name: value for name, value in globals().items() if name.startswith("result")}
print(json.dumps({name: msgspec.to_builtins(value.usage) for name, value in found.items()}))
"""

#: Registered before anything else, so that it runs after everything has been closed.
LEFT_OVER = """
import atexit
from runtime_cache.aclsim import inspect
atexit.register(lambda: print(inspect.report().num_alive, inspect.report().misuses))
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_brief_bundle(tmp_path_factory.mktemp("brief"))


def run(program: str, directory: Path, *flags: str, **env: str) -> tuple[str, list[str]]:
    """Run a program to its end, which must be a clean one; its output and its lines of log."""
    path = directory / "program.py"
    path.write_text(program, "utf-8")
    plain = {name: text for name, text in os.environ.items() if not name.startswith("RTCACHE_")}
    ended = subprocess.run(
        [sys.executable, *flags, str(path)],
        env=plain | {"PYTHONUTF8": "1"} | env,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr.splitlines()


def ported(program: str, bundle: Path) -> str:
    """The article's program, changed as its readers would."""
    return (
        program.replace("from atb import", "from runtime_cache import")
        .replace("meta-llama/Llama-2-7b-hf", str(bundle))
        .replace("npu:0", "sim:0")
    )


def test_the_whole_article_is_one_program(bundle: Path, tmp_path: Path) -> None:
    """It binds `model` three times and closes nothing; all of it ends cleanly."""
    program = LEFT_OVER + ported(AUTOMATIC + EXPLICIT + LIFE + CHAT, bundle)
    out, log = run(program, tmp_path, "-W", "error", RTCACHE_DEVICE_DEVICE="sim:0")
    assert out == "0 ()\n"
    (line,) = (json.loads(text) for text in log)
    # 48 GB are more than this bundle was compiled for.
    assert (line["event"], line["asked_gb"]) == ("cache_capacity_capped", 48)


@pytest.fixture(scope="module")
def usage(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the results used: after `AUTOMATIC`, after `EXPLICIT`, and at the end."""
    program = ported(AUTOMATIC + USAGE + EXPLICIT + USAGE + LIFE + CHAT + USAGE, bundle)
    out, _ = run(program, tmp_path_factory.mktemp("usage"), RTCACHE_DEVICE_DEVICE="sim:0")
    return [json.loads(line) for line in out.splitlines()]


def test_a_common_beginning(usage: list[dict[str, Any]]) -> None:
    shared = 1 + len("系统：你是AI助手\n用户：什么是".encode())
    first, second = usage[0]["result1"], usage[0]["result2"]
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == shared
    assert second["prefilled_tokens"] == len("Ascend C")


def test_a_registered_prefix(usage: list[dict[str, Any]]) -> None:
    system = "你是一个专业的AI助手，请用中文回答问题。以下是几个示例：\n示例1: ...\n示例2: ..."
    num_prefix, num_question = 1 + len(system.encode()), len("请解释什么是昇腾NPU".encode())
    used = usage[1]["result"]
    assert used["prompt_tokens"] == num_prefix + num_question
    assert used["cached_tokens"] == num_prefix
    assert used["prefilled_tokens"] == num_question


def test_a_conversation(usage: list[dict[str, Any]]) -> None:
    first, second = usage[2]["result1"], usage[2]["result2"]
    assert first["cached_tokens"] == 0
    # The prompt and the answer, but for the end token that nothing was computed for.
    assert second["cached_tokens"] == first["prompt_tokens"] + first["completion_tokens"] - 1
    next_turn = "\nuser: 它和CUDA是什么关系？\nassistant: "
    assert second["prefilled_tokens"] == len(next_turn.encode())


# --- how programs end --------------------------------------------------------------------------

OPEN = """
import os, threading
from runtime_cache import LLM
from runtime_cache.llm import Closed
model = LLM("meta-llama/Llama-2-7b-hf", "npu:0")
"""

ENDS = {
    "in the middle of everything": """
stream = model.stream("a", ignore_eos=True)
model.myself = model
threading.Thread(target=model.generate, args=["a"], daemon=True).start()
""",
    "before its threads": """
threading.Thread(target=model.generate, args=["a"]).start()
del model
""",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_that_ends(bundle: Path, tmp_path: Path, name: str) -> None:
    out, log = run(LEFT_OVER + ported(OPEN + ENDS[name], bundle), tmp_path)
    assert (out, log) == ("0 ()\n", [])


def test_a_fork(bundle: Path, tmp_path: Path) -> None:
    """The child ends as those of `multiprocessing` do."""
    fork = """
child = os.fork()
if not child:
    try:
        model.generate("a")
    except Closed as error:
        print(error, flush=True)
    model.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
model.generate("a")
"""
    out, _ = run(ported(OPEN + fork, bundle), tmp_path)
    assert out.startswith("this LLM belongs to process ")


def test_the_package_is_light_and_takes_no_device_unasked(bundle: Path, tmp_path: Path) -> None:
    program = f"""
import sys
import runtime_cache
assert not {{"numpy", "msgspec", "zmq", "uvloop", "asyncio"}} & set(sys.modules)
assert "LLM" in dir(runtime_cache)
try:
    runtime_cache.Llm
except AttributeError as error:
    print(error)
from runtime_cache import LLM
sys.modules["acl"] = None  # no card here
try:
    LLM({str(bundle)!r})
except runtime_cache.errors.ConfigError as error:
    print(error)
"""
    out, log = run(program, tmp_path, "-W", "error")
    first, second = out.splitlines()
    assert first == "module 'runtime_cache' has no attribute 'Llm'"
    assert 'say so: LLM(..., device="sim:0")' in second
    assert log == []
