import pytest

from verl.core.errors import ConfigError
from verl.flow.devices import Device, device_group


@pytest.mark.parametrize("text, devices, own, words", [
    ("cpu", [Device()], False, "cpu"), ("cpu*1", [Device()], True, "cpu*1"), ("cpu*3", [Device()] * 3, True, "cpu*3"),
    ("cuda", [Device(0)], False, "cuda:0"), ("cuda:2", [Device(2)], False, "cuda:2"),
    ("cuda:0-1", [Device(0), Device(1)], True, "cuda:0,1"), ("cuda:0,2-3", [Device(0), Device(2), Device(3)], True, "cuda:0,2,3"),
    ("far/cuda:2", [Device(2, "far")], True, "far/cuda:2"), ("far/cpu", [Device(None, "far")], True, "far/cpu*1"),
    ("a/cuda:0-1 + b/cuda:0", [Device(0, "a"), Device(1, "a"), Device(0, "b")], True, "a/cuda:0,1+b/cuda:0")])
def test_groups(text, devices, own, words):
    group = device_group(text, "x")
    assert group.devices == tuple(devices) and group.own is own and str(group) == words
    assert device_group(words, "x") == group


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:1-", "cuda:2-1", "cpu*0", "cuda:0,0", "cuda:0-1+cuda:1", "", "3"])
def test_what_names_no_devices_is_refused(text):
    with pytest.raises(ConfigError, match="placement.actor: .*cuda:0-1"):
        device_group(text, "placement.actor")
