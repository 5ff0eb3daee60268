"""What is served: the bundle that the configuration names, its tokenizer, its chat template."""

from __future__ import annotations

from pathlib import Path

import structlog

from om_models.bundle import Bundle, load_bundle
from om_models.chat import ChatTemplateError
from om_models.chat_process import ChatProcess
from om_models.tokenizer import Tokenizer, TokenizerError
from runtime_cache.config import Config
from runtime_cache.device.select import parse_device
from runtime_cache.errors import BundleError, ConfigError
from runtime_cache.start_stages import StartStages

log = structlog.get_logger(__name__)


def read_bundle(config: Config, stages: StartStages) -> Bundle:
    """Read and check the bundle that is configured; it suits the device's kind.

    Raises:
        ConfigError: bundle or device are not named, or the bundle is damaged or for another target.
    """
    if not config.model.bundle:
        raise ConfigError("model.bundle is not set: name a directory made by rtcache-convert")
    if not config.device.device:
        raise ConfigError(
            'device.device is not set: "npu:0" for Ascend device 0, "sim:0" for the software device'
        )
    kind, _ = parse_device(config.device.device)
    log.info("bundle_reading", path=config.model.bundle, verify=config.model.verify)
    stages.reading(config.model.bundle)
    path, verify = Path(config.model.bundle), config.model.verify
    bundle = load_bundle(path, verify=verify, progress=stages.checking)
    wanted = "sim" if kind == "sim" else "ascend"
    if bundle.manifest.target != wanted:
        raise BundleError(
            f"the bundle was made with --target {bundle.manifest.target}, device "
            f"{config.device.device} needs --target {wanted}: convert again"
        )
    return bundle


def read_texts(bundle: Bundle) -> tuple[Tokenizer, ChatProcess | None]:
    """Its tokenizer and its chat template, if it has one.

    Raises:
        BundleError: one of them is not usable.
    """
    manifest = bundle.manifest
    try:
        tokenizer = Tokenizer.load(
            bundle.path / "tokenizer.json", manifest.bos_token_id, manifest.eos_token_ids
        )
        if manifest.chat_template is None:
            return tokenizer, None
        bos, eos = manifest.bos_token_id, manifest.eos_token_ids
        template = ChatProcess(
            manifest.chat_template,
            bos_token="" if bos is None else tokenizer.token_text(bos),
            eos_token=tokenizer.token_text(eos[0]) if eos else "",
        )
    except (TokenizerError, ChatTemplateError) as error:
        raise BundleError(f"{bundle.path}: {error}") from error
    return tokenizer, template
