import pytest
import torch
from safetensors.torch import save_file
from tiny_models import images, load, real

from fedfm.errors import InputError
from fedfm.models.architectures.resnet import CifarResNet, ResNetConfig, build


def checkpoint(path, blocks=1):
    torch.manual_seed(0)
    net = CifarResNet(ResNetConfig(blocks, 10))
    save_file(net.state_dict(), path)
    return net.eval()


def test_shortcut_takes_every_second_pixel_and_pads_channels():
    net = CifarResNet(ResNetConfig(1, 10)).eval()
    block = net.layer2[0]
    with torch.no_grad():
        block.bn2.weight.zero_()  # the residual branch is switched off
        x = torch.rand(2, 16, 8, 8)
        y = block(x)
    assert y.shape == (2, 32, 4, 4)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert y[:, :8].abs().sum() == y[:, 24:].abs().sum() == 0


@pytest.mark.parametrize(("name", "layers", "parameters"), [("20", 20, 269_722), ("56", 56, 853_018)])
def test_real_checkpoints_have_the_papers_sizes(name, layers, parameters):
    from safetensors.torch import load_file

    state = load_file(real(f"cifar10_resnet{name}.safetensors"))
    net = build(state, 10)
    assert 6 * net.config.blocks + 2 == layers
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert torch.equal(net.layer3[-1].conv2.weight, state[f"layer3.{len(net.layer3) - 1}.conv2.weight"])


def test_a_checkpoint_file_of_a_resnet_is_loaded(tmp_path):
    net = checkpoint(tmp_path / "net.safetensors")
    table = images(side=32)
    model = load(tmp_path / "net.safetensors", table, "head")
    rows = model.prepare(table, range(5))
    x = torch.from_numpy(table.inputs).permute(0, 3, 1, 2) / 255
    mean, std = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    torch.testing.assert_close(rows.tensors["pixel_values"], (x - mean[:, None, None]) / std[:, None, None])
    caught = []
    net.linear.register_forward_pre_hook(lambda _, a: caught.append(a[0]))
    with torch.no_grad():
        net(rows.tensors["pixel_values"])
    torch.testing.assert_close(model.features(rows), caught[0])
    torch.testing.assert_close(model.predict(model.encode(rows)), model.predict(rows))
    assert len(model.blocks(rows)) == 4
    random = load(tmp_path / "net.safetensors", table, "head", weights="random")
    assert random.fingerprint != model.fingerprint
    assert load(tmp_path / "net.safetensors", table, "full").fingerprint == model.fingerprint


def test_files_that_are_not_a_resnet_are_refused(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    save_file({"conv1.weight": torch.zeros(3)}, tmp_path / "b.safetensors")
    save_file({f"layer{s}.0.conv1.weight": torch.zeros(3) for s in (1, 2, 3)}, tmp_path / "c.safetensors")
    for name in "abc":
        with pytest.raises(InputError, match="is not a CIFAR ResNet"):
            load(tmp_path / f"{name}.safetensors", images())
