"""The emulated device itself: values, device checks and counts."""

import pytest
import torch

from tests.cuda.emulated import CPU, CUDA, EmulatedCuda, backend, on_host


@pytest.fixture
def gpu():
    with EmulatedCuda() as device:
        yield device


def test_values_and_gradients_are_those_of_the_cpu(gpu):
    layer = torch.nn.Linear(5, 3)
    x = torch.randn(4, 5)
    want = torch.autograd.grad(layer(x).square().sum(), layer.weight)[0]
    layer.to("cuda")
    layer(x.to("cuda")).square().sum().backward()
    assert layer.weight.device == layer.weight.grad.device == CUDA
    assert torch.equal(on_host(layer.weight.grad), want)
    assert torch.nn.functional.embedding(torch.tensor([1], device="cuda"), layer.weight).is_cuda


def test_mixed_devices_are_refused(gpu):
    here, there = torch.ones(3, device="cuda"), torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices"):
        here + there
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.cat([there, here])
    assert (here + torch.tensor(1.0)).tolist() == [2, 2, 2]  # numbers may be on the CPU


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool((x > 0).all()), "_local_scalar_dense"),
        (lambda x: x.tolist(), "copy to the host"),
        (lambda x: x.cpu(), "copy to the host"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index by a mask"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: torch.tensor([1], device=x.device), "copy to the device"),
        (lambda x: x[[0, 1]], "copy to the device"),
    ],
)
def test_a_wait_of_the_host_is_counted(gpu, read, kind):
    x = torch.ones(3, device="cuda")
    gpu.reset()
    (x * 2).view(3, 1).expand(3, 2)
    assert not gpu.syncs
    read(x)
    assert [found.split(":")[0] for found in gpu.syncs] == [kind]


def test_views_and_allocations_launch_nothing(gpu):
    x = torch.ones(4, device="cuda")
    gpu.reset()
    torch.empty_like(x).view(2, 2).transpose(0, 1)[0].detach()
    assert not gpu.launches
    x.mul_(2).add(1)
    assert gpu.launches == {"mul_": 1, "add": 1}


def test_data_moves_to_the_host_and_back(gpu):
    weight = torch.nn.Parameter(torch.arange(3.0, device="cuda"))
    weight.data = weight.data.to("cpu")
    assert weight.device == CPU
    weight.data = weight.data.to("cuda")
    assert weight.device == CUDA
    assert weight.tolist() == [0, 1, 2]


def test_autocast_is_that_of_the_device(gpu):
    x = torch.ones(2, 2, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.get_autocast_dtype("cuda") == torch.bfloat16
    assert not torch.is_autocast_enabled("cuda")


def test_kernels_of_attention():
    assert backend(torch.bfloat16, 64, mask=False, gqa=True) == "flash"
    assert backend(torch.bfloat16, 64, mask=True, gqa=False) == "efficient"
    assert backend(torch.float32, 64, mask=False, gqa=False) == "efficient"
    assert backend(torch.float32, 64, mask=False, gqa=True) == "math"
