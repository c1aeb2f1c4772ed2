"""A range of device addresses that stays, behind which memory comes and goes (CUDA virtual memory management).

CUDA graphs hold addresses: with this they stay valid while the cache's memory serves training.
"""

from __future__ import annotations

import torch

from verl.core.errors import CapacityError

try:
    from cuda.bindings import driver
except ImportError:  # the cache then moves when it is dropped, and graphs are captured again
    driver = None


def _done(result: tuple):
    """The value of a driver call; RuntimeError naming the code when it failed."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver: {code.name}")
    return values[0] if values else None


class Arena:
    """`size` bytes at an address of their own. `wake` backs it with memory and returns it as uint8; `sleep` frees that."""

    def __init__(self, size: int, device: torch.device):
        torch.cuda.init()
        self.device, self.awake = torch.device(device), False
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        self.location = driver.CUmemAllocationProp()
        self.location.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.location.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.location.location.id = index
        grain = _done(driver.cuMemGetAllocationGranularity(
            self.location, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM))
        self.size = -(-size // grain) * grain
        self.address = _done(driver.cuMemAddressReserve(self.size, 0, driver.CUdeviceptr(0), 0))

    def wake(self) -> torch.Tensor:
        """Raises CapacityError when the device has not that much memory left."""
        if not self.awake:
            handle = self._memory()
            _done(driver.cuMemMap(self.address, self.size, 0, handle, 0))
            _done(driver.cuMemRelease(handle))  # the mapping keeps the memory alive
            access = driver.CUmemAccessDesc()
            access.location = self.location.location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            _done(driver.cuMemSetAccess(self.address, self.size, [access], 1))
            self.awake = True
        return torch.as_tensor(self, device=self.device)

    def _memory(self):
        torch.cuda.empty_cache()  # what training left in torch's cache: the device then holds the larger phase, not both
        try:
            return _done(driver.cuMemCreate(self.size, self.location, 0))
        except RuntimeError as error:
            free = torch.cuda.mem_get_info(self.device)[0]
            raise CapacityError(f"the key-value cache needs {self.size / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free "
                                f"({error}); lower kv_tokens or kv_memory") from error

    def sleep(self) -> None:
        if self.awake:
            torch.cuda.synchronize(self.device)
            _done(driver.cuMemUnmap(self.address, self.size))
            self.awake = False

    def close(self) -> None:
        self.sleep()
        if self.address is not None:
            _done(driver.cuMemAddressFree(self.address, self.size))
            self.address = None

    @property
    def __cuda_array_interface__(self) -> dict:
        return {"shape": (self.size,), "typestr": "|u1", "data": (int(self.address), False), "version": 3}
