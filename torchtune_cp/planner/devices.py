"""Performance and memory of devices and their links, from the manufacturers' data sheets.

Sources of the figures:

- H100 SXM and H200 SXM: nvidia.com/en-us/data-center/h100 and /h200: 1,979 TFLOPS bfloat16 "with sparsity",
  half of it dense; 67 TFLOPS float32; 80 GB at 3.35 TB/s and 141 GB at 4.8 TB/s; NVLink 900 GB/s, PCIe 5
  128 GB/s, both counting both directions.
- A100 80 GB SXM: NVIDIA's data sheet nvidia-us-1758950: 312 TFLOPS dense bfloat16, 19.5 float32, 2,039 GB/s,
  NVLink 600 GB/s, PCIe 4 64 GB/s, both counting both directions.
- Between nodes: docs.nvidia.com/dgx-basepod, core components: DGX H100 and H200 have eight single-port
  ConnectX-7 of 400 Gb/s for eight GPUs; developer.nvidia.com/blog/defining-ai-innovation-with-dgx-a100: eight
  single-port ConnectX-6 of 200 Gb/s.
- Usable memory is what the CUDA driver gives a process, a little less than `nvidia-smi` lists (81,559 MiB
  for an H100, 143,771 for an H200, 81,920 for an A100), as torch's out-of-memory messages report it.

Fractions of the peak that real kernels reach, and the bytes that a CUDA process takes besides its tensors,
are estimates: none of them has been measured by this project yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchtune_cp.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        name: As given on the command line.
        memory: Bytes that the driver reports as usable.
        flops: Dense operations per second in bfloat16.
        flops32: The same in float32, as torch multiplies by default (no TF32).
        bandwidth: Bytes per second from and to its memory.
        link: Bytes per second and direction to the other devices of a node.
        network: Bytes per second and direction of one device to other nodes.
        host_link: Bytes per second and direction to host memory.
        host_bandwidth: Bytes per second that the cores of a node read and write its memory with: an estimate.
        per_node: Devices in a node.
        context: Bytes of the CUDA context, its libraries and their workspaces: an estimate.
        communicator: Bytes of NCCL's buffers for each process group: an estimate.
        fragmentation: Share of the tensors' bytes lost between blocks: an estimate.
        host_process: Bytes of host memory of a process with CUDA and torch's libraries: an estimate.
        source: Source of the figures.
    """

    name: str
    memory: float
    flops: float
    flops32: float
    bandwidth: float
    link: float
    network: float
    host_link: float
    host_bandwidth: float
    per_node: int
    context: float
    communicator: float
    fragmentation: float
    host_process: float
    source: str

    @property
    def is_gpu(self) -> bool:
        """Whether operators and memories are those of a GPU."""
        return self.name != "cpu"


#: Fractions of the peak: matrix products, fused attention forward and backward, memory, links. Estimates.
PRODUCT_EFFICIENCY = 0.70
ATTENTION_EFFICIENCY = 0.60
ATTENTION_BACKWARD_EFFICIENCY = 0.50
MEMORY_EFFICIENCY = 0.80
LINK_EFFICIENCY = 0.75
#: Seconds that starting a collective takes.
LATENCY = 20e-6

DEVICES = {
    device.name: device
    for device in (
        Device(
            name="h100-80g",
            memory=79.1 * GIB,
            flops=989e12,
            flops32=67e12,
            bandwidth=3.35e12,
            link=450e9,
            network=50e9,
            host_link=64e9,
            host_bandwidth=200e9,
            per_node=8,
            context=0.9 * GIB,
            communicator=0.25 * GIB,
            fragmentation=0.02,
            host_process=4 * GIB,
            source="NVIDIA H100 SXM data sheet: 989 TFLOPS dense bf16, 67 fp32, 80 GB at 3.35 TB/s,"
            " NVLink 900 GB/s both ways, PCIe 5; DGX H100: one 400 Gb/s port for each GPU",
        ),
        Device(
            name="h200",
            memory=139.8 * GIB,
            flops=989e12,
            flops32=67e12,
            bandwidth=4.8e12,
            link=450e9,
            network=50e9,
            host_link=64e9,
            host_bandwidth=200e9,
            per_node=8,
            context=0.9 * GIB,
            communicator=0.25 * GIB,
            fragmentation=0.02,
            host_process=4 * GIB,
            source="NVIDIA H200 SXM data sheet: 989 TFLOPS dense bf16, 67 fp32, 141 GB at 4.8 TB/s,"
            " NVLink 900 GB/s both ways, PCIe 5; DGX H200: one 400 Gb/s port for each GPU",
        ),
        Device(
            name="a100-80g",
            memory=79.2 * GIB,
            flops=312e12,
            flops32=19.5e12,
            bandwidth=2.039e12,
            link=300e9,
            network=25e9,
            host_link=32e9,
            host_bandwidth=130e9,
            per_node=8,
            context=0.7 * GIB,
            communicator=0.25 * GIB,
            fragmentation=0.02,
            host_process=4 * GIB,
            source="NVIDIA A100 SXM data sheet: 312 TFLOPS dense bf16, 19.5 fp32, 80 GB at 2,039 GB/s,"
            " NVLink 600 GB/s both ways, PCIe 4; DGX A100: one 200 Gb/s port for each GPU",
        ),
        Device(
            name="cpu",
            memory=float("inf"),
            flops=90e9,
            flops32=90e9,
            bandwidth=10e9,
            link=1e9,
            network=1e9,
            host_link=10e9,
            host_bandwidth=10e9,
            per_node=8,
            context=0.0,
            communicator=0.0,
            fragmentation=0.0,
            host_process=0.0,
            source="one core of the machine of docs/measurements/performance.md: 90 GFLOP/s in float32 matrix"
            " products, the rest is assumed; the process itself (about 0.3 GiB) is not counted, and memory is"
            " unlimited",
        ),
    )
}


def device_named(name: str) -> Device:
    """Find a device.

    Raises:
        ConfigError: Unknown device name.
    """
    if name not in DEVICES:
        raise ConfigError(f"--device: {name!r}: allowed are {', '.join(DEVICES)}")
    return DEVICES[name]
