"""The engines that need nothing but torch and transformers, held against the rules of all engines."""

from tests.engine.conformance import LIMIT, Conformance
from verl.engine.hf_engine import HFEngine
from verl.engine.native.config import NativeConfig
from verl.engine.native.engine import NativeEngine


class TestNative(Conformance):
    def build(self, lm, path):
        return NativeEngine(lm, NativeConfig(max_total_tokens=LIMIT, kv_tokens=4096))


class TestHF(Conformance):
    def build(self, lm, path):
        return HFEngine(lm, max_total_tokens=LIMIT)
