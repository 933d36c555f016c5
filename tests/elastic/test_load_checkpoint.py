"""Checkpoint files outside a job: any safetensors reader has the tensors, nbelastic the rest."""

import sys
import types
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file

import nbelastic
import nbelastic.torch as hvd
from nbelastic.elastic import ObjectState
from nbelastic.elastic.checkpoint.files import CheckpointFiles
from nbelastic.elastic.checkpoint.format import _NAMES
from nbelastic.errors import NbelasticError
from tests.elastic.members import job, nothing, resumed
from tests.elastic.test_checkpoint_files import put
from tests.torch.nets import new_net


def write(url, make, change=nothing, *, run="a"):
    """Make a state in a job of one rank, change it, and commit; return the state."""
    state, notes, _ = job(url, make, change, run=run)
    assert all(note.startswith("commit") for note in notes), notes
    return state


def the_file(url):
    (path,) = Path(url).rglob("*.safetensors")
    return path


def training(wrap=lambda optimizer, names: optimizer):
    model = new_net(3)
    del model.stretched  # torch loads no value into memory that overlaps
    optimizer = torch.optim.AdamW(
        [{"params": model.first.parameters(), "lr": 0.1}, {"params": model.norm.parameters()}]
    )
    return hvd.elastic.TorchState(
        model,
        wrap(optimizer, model.named_parameters()),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        generator=torch.Generator().manual_seed(5),
        sampler=hvd.elastic.ElasticSampler(range(20), shuffle=False),
        averages=[torch.full((2,), 7.0, dtype=torch.bfloat16)],
        helper=types.SimpleNamespace(model=model),
        epoch=0,
    )


def train(state):
    state.model(torch.rand(3, 4)).sum().backward()
    state.optimizer.step()
    state.scheduler.step()
    state.sampler.record_batch(0, 6)
    torch.rand(3, generator=state.generator)
    state.epoch = 3


def equal(one, other):
    """Return whether nested values are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_safetensors_readers_find_tensors_under_their_names(tmp_path):
    state = write(tmp_path, training, train)
    path = the_file(tmp_path)
    found = load_file(path)
    assert equal(found["model.first.weight"], state.model.first.weight.detach())
    assert equal(found["model.norm.num_batches_tracked"], torch.tensor(1))
    assert equal(found["model.seen"], torch.tensor([3.0]))
    assert equal(found["averages.0"], state.averages[0])
    assert "model.tied.weight" not in found, "tied parameters are stored once"
    moments = state.optimizer.state[state.model.norm.bias]
    assert equal(found["optimizer.state.3.exp_avg"], moments["exp_avg"])
    assert equal(found["generator"], state.generator.get_state())
    assert not [name for name in found if name.startswith("tensor.")]
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert (metadata["job"], metadata["version"], metadata["loop"]) == ("job", "1", "1")


@pytest.mark.parametrize("wrap", [(), (hvd.DistributedOptimizer,)], ids=["plain", "wrapped"])
def test_state_dicts_load_into_objects_made_anew(tmp_path, wrap):
    state = write(tmp_path, lambda: training(*wrap), train)
    loaded = nbelastic.load_checkpoint(tmp_path)
    fresh = training()
    assert equal(loaded["optimizer"], state.optimizer.state_dict())
    assert loaded["model"].keys() == state.model.state_dict().keys()
    for name in ("model", "optimizer", "scheduler", "sampler"):
        getattr(fresh, name).load_state_dict(loaded[name])
    assert equal(dict(fresh.model.state_dict()), dict(state.model.state_dict()))
    assert equal(fresh.optimizer.state_dict(), state.optimizer.state_dict())
    assert fresh.scheduler.state_dict() == state.scheduler.state_dict()
    assert fresh.sampler.remaining_indices == list(range(6, 20))
    assert fresh.model.extra.calls == 1
    assert torch.equal(loaded["generator"], state.generator.get_state())
    assert equal(loaded["averages"], state.averages)
    assert loaded["epoch"] == 3
    assert loaded["helper"].model is loaded["model"]
    (average,) = loaded["averages"]
    assert average.untyped_storage().nbytes() == average.nbytes, "pickling takes whole storages"
    assert loaded["model"]["tied.weight"] is loaded["model"]["first.weight"]


UNKNOWN = ["float8_e5m2fnuz", "complex64", "complex128"]  # to some readers of safetensors


def odd_tensors():
    """Return tensors of all types, without elements, without axes, not contiguous, sparse."""
    bits = torch.arange(48, dtype=torch.uint8) % 2
    found = {name: bits.view(getattr(torch, name)).clone() for name in [*_NAMES, *UNKNOWN]}
    found["conjugate"] = torch.complex(torch.rand(3), torch.rand(3)).conj()
    found["empty"] = torch.empty(0, 3)
    found["scalar"] = torch.tensor(2.5)
    found["transposed"] = torch.arange(6.0).view(2, 3).t()
    found["image"] = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    found["sparse"] = torch.eye(3).to_sparse()
    return found


def same_bits(one, other):
    if one.is_quantized:
        return torch.equal(one, other)
    if one.is_sparse:
        return torch.equal(one.to_dense(), other.to_dense())
    plain = [each.detach().resolve_conj().contiguous().view(-1) for each in (one, other)]
    bits = [each.view(torch.uint8) if each.numel() else each for each in plain]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_tensors_of_all_types_and_shapes_come_back_bit_by_bit(tmp_path):
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.1, 3, torch.quint8)
    tensors = {**odd_tensors(), "quantized": quantized}
    write(tmp_path, lambda: hvd.elastic.TorchState(odd=dict(tensors)))
    found = nbelastic.load_checkpoint(the_file(tmp_path))["odd"]
    gone_on = resumed(tmp_path, lambda: hvd.elastic.TorchState(odd=None))[0].odd
    for name, tensor in tensors.items():
        assert same_bits(found[name], tensor), name
        assert same_bits(gone_on[name], tensor), name
    known = load_file(the_file(tmp_path))
    assert same_bits(known["odd.image"], tensors["image"])
    for name in [*_NAMES, *UNKNOWN]:
        kept = torch.uint8 if name in UNKNOWN else getattr(torch, name)
        assert known[f"odd.{name}"].dtype == kept, name


def test_names_are_distinct_and_fit_into_json(tmp_path):
    values = {
        "a": {"b": torch.zeros(1), "b.c": torch.ones(1)},
        "a.b": torch.full((1,), 2.0),
        "\udcff": torch.full((1,), 3.0),
        "nbelastic": {"pickle": torch.full((1,), 4.0), "checksum": torch.full((1,), 5.0)},
    }
    write(tmp_path, lambda: hvd.elastic.TorchState(x=values, nbelastic=values["nbelastic"]))
    found = load_file(the_file(tmp_path))
    assert found["x.a.b"] == 0
    assert found["x.a.b.2"] == 2
    assert found["x.\\udcff"] == 3
    assert equal(nbelastic.load_checkpoint(tmp_path)["x"], values)


def test_what_a_directory_or_url_has_is_the_newest_complete_one(tmp_path):
    for url in (tmp_path, "memory://test-load-checkpoint/here"):
        for run, count in (("a", 1), ("b", 2)):
            write(url, lambda count=count: ObjectState(count=count), run=run)
        assert nbelastic.load_checkpoint(url) == {"count": 2}
    first, second = sorted(tmp_path.iterdir())
    assert nbelastic.load_checkpoint(first) == {"count": 1}
    torn = the_file(second)
    torn.write_bytes(torn.read_bytes()[:-1])
    assert nbelastic.load_checkpoint(str(tmp_path)) == {"count": 1}
    with pytest.raises(NbelasticError, match=rf"{torn}: it is not complete"):
        nbelastic.load_checkpoint(torn)


def test_a_place_without_a_checkpoint_is_an_error(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere", "memory://test-load-checkpoint/nothing"):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint in {place}"):
            nbelastic.load_checkpoint(place)


def test_a_file_of_another_program_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(
        NbelasticError, match=r"model\.safetensors: .*not complete, or no checkpoint"
    ):
        nbelastic.load_checkpoint(path)
    path = put(CheckpointFiles(str(tmp_path), "a"), 1)  # without a commit in it
    with pytest.raises(NbelasticError, match="cannot be unpickled"):
        nbelastic.load_checkpoint(path)


def test_a_class_that_is_missing_is_named(tmp_path, monkeypatch):
    module = types.ModuleType("module_of_the_users")
    exec("class Schedule:\n    pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    write(tmp_path, lambda: ObjectState(schedule=module.Schedule()))
    assert isinstance(nbelastic.load_checkpoint(tmp_path)["schedule"], module.Schedule)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(NbelasticError, match="No module named 'module_of_the_users'") as caught:
        nbelastic.load_checkpoint(tmp_path)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
