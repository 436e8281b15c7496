"""Having memory brought near before it is needed."""

from octavo.kernels.cpu.compiled import inlined
from octavo.kernels.cpu.intrinsics import prefetch


@inlined
def fetch(address: int, count: int) -> None:
    """Have `count` bytes brought near while other work goes on."""
    for offset in range(0, count, 64):
        prefetch(address + offset)
