"""Eight simulated devices, silent rank promotion off, and shapes checked against their annotations."""

import gc
import os
import tempfile

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("GLIBC_TUNABLES", "")  # scripts that run inside this process must not start it again

from jaxtyping import install_import_hook

install_import_hook("dflash_jax", "beartype.beartype")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
# Runs in this process must not turn the user's compilation cache on: one of the tests' own, for this session.
_cache = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", _cache.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

import pytest

from dflash_jax.data.chat import ChatTokenizer
from tests.fixtures import save_chat_target, save_tokenizer
from tests.helpers import MEASURED


@pytest.fixture(scope="module", autouse=True)
def executables_are_dropped():
    """Those that a file of tests leaves in JAX's caches. Each has memory mappings, of which a process has 65530."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    """A tokenizer with a ChatML template."""
    return save_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def chat(chat_folder):
    """The same, loaded."""
    return ChatTokenizer(chat_folder)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    """A tiny target with the same tokenizer: all that a script needs."""
    return save_chat_target(tmp_path_factory.mktemp("target"))


def pytest_terminal_summary(terminalreporter):
    """Show what tests have measured, whichever process they ran in."""
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == MEASURED:
                terminalreporter.write_line(value)
