"""The optimizer with what torch puts around optimizers: schedulers, scalers, closures, hooks."""

import copy
import io
import pickle
import warnings
import weakref

import cloudpickle
import pytest
import torch

import nbelastic.torch as hvd
from nbelastic.errors import NotInitialized
from tests.torch.ranks import on_ranks
from tests.torch.training import (
    SGD,
    assert_equal,
    distributed,
    loss_of,
    make_model,
    parameters_of,
    stepped,
)


@pytest.mark.parametrize("early", [True, False])
def test_grad_scaler_with_a_fused_optimizer(twin, early):
    model = make_model().float()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = parameters_of(model)
    scaler.scale(model(torch.ones(1, 6)).sum()).backward()
    if early:
        with pytest.raises(RuntimeError, match="looked for infinities before"):
            scaler.step(optimizer)
    else:
        optimizer.synchronize()
        scaler.step(optimizer)
    assert torch.equal(before[0], model[0].weight) == early


@on_ranks(2)
def test_closures_may_return_numbers_or_nothing(context):
    model, optimizer = distributed()

    def closure(loss):
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        return loss

    assert optimizer.step(lambda: closure(float(context.rank))) == 0.5
    assert optimizer.step(lambda: closure(None)) is None


def test_step_hooks_run_once_and_see_reduced_gradients(twin):
    seen, model = [], make_model()
    optimizer = SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].bias.grad.clone()))
    (local,) = torch.autograd.grad(loss_of(model, 0), model[0].bias)
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
    optimizer.load_state_dict(optimizer.state_dict())  # where torch would patch the class again
    stepped(optimizer, model)
    assert_equal(seen, [2 * local])


def test_the_result_is_the_optimizer_that_was_given(twin):
    optimizer = torch.optim.AdamW(make_model().parameters())
    state, groups = optimizer.state, optimizer.param_groups
    distributed = hvd.DistributedOptimizer(optimizer)
    assert distributed is optimizer
    assert isinstance(distributed, torch.optim.AdamW)
    assert type(distributed).__name__ == "AdamW"
    assert distributed.state is state
    assert distributed.param_groups is groups
    assert repr(distributed) == repr(torch.optim.AdamW(make_model().parameters()))


def test_a_copied_model_and_that_of_a_dropped_optimizer_send_nothing(twin):
    model, optimizer = distributed()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(copied, 0).backward()
    alive = weakref.ref(optimizer._reducer)
    del optimizer
    assert alive() is None
    for step in range(2):
        loss_of(model, step).backward()
    assert twin.communicator().lent == []


@pytest.mark.parametrize(
    "options", [{}, {"compression": hvd.Compression.none()}], ids=["buckets", "none"]
)
def test_an_optimizer_that_was_replaced_does_not_disturb(twin, options):
    """Also by one without buckets, as with a compressor of the user's own."""
    model = make_model()
    old = hvd.DistributedOptimizer(SGD(model.parameters()))
    for step in range(4):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), **options)
        stepped(optimizer, model, step)
    launched = len(twin.communicator().lent)
    assert options or launched == 4
    loss_of(model, 4).backward()
    assert not old._reducer.pending
    optimizer.synchronize()
    old.step()
    for step in range(2):
        stepped(optimizer, model, step)
    assert options or len(twin.communicator().lent) == launched + 4


def test_init_comes_first():
    with pytest.raises(NotInitialized, match=r"init\(\)"):
        hvd.DistributedOptimizer(SGD(make_model().parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"named_parameters": ["weight"]}, "pairs of a name and a parameter"),
        ({"op": hvd.Min}, "op must be Average, Sum or Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"op": hvd.Adasum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"gradient_predivide_factor": 0.0}, "must be positive"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"groups": -1}, "at least 0"),
        ({"groups": [[torch.ones(1)]]}, "parameters of the optimizer"),
        ({"process_set": [0]}, "process_set"),
        ({"compression": "fp16"}, "compression must be"),
        (lambda model: {"groups": [[model[0].bias], [model[0].bias]]}, "twice"),
        (
            lambda model: {"named_parameters": [("layer", each) for each in model.parameters()]},
            r"unique; repeated: \['layer'\]",
        ),
        (
            lambda model: {"named_parameters": list(model.named_parameters())[:4]},
            r"lacks parameters.*: 0\.4, 0\.5",
        ),
    ],
)
def test_wrong_arguments_change_nothing(twin, options, message):
    model = make_model()
    optimizer = SGD(model.parameters())
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(optimizer, **(options(model) if callable(options) else options))
    assert type(optimizer) is torch.optim.SGD
    hvd.DistributedOptimizer(optimizer, model.named_parameters())
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)


def test_num_groups_is_the_old_name_of_groups(twin):
    model = make_model()
    with pytest.warns(DeprecationWarning, match="groups"):
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), num_groups=3)
    stepped(optimizer, model)
    assert len(twin.communicator().lent) == 3


# -- saved and copied ------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduled", [False, True], ids=["", "with a scheduler"])
def test_a_saved_optimizer_is_the_plain_one(twin, scheduled):
    model, optimizer = distributed()
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepped(optimizer, model)
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    for loaded in (
        torch.load(file, weights_only=False),
        pickle.loads(pickle.dumps(optimizer)),
        pickle.loads(cloudpickle.dumps(optimizer)),
    ):
        assert type(loaded) is torch.optim.SGD
        assert str(loaded.state_dict()) == str(optimizer.state_dict())
        (group,) = loaded.param_groups
        assert_equal(group["params"], parameters_of(model))
        optimizer.load_state_dict(copy.deepcopy(loaded.state_dict()))
    together, other = pickle.loads(pickle.dumps((model, optimizer)))
    hvd.DistributedOptimizer(other)
    assert_equal(stepped(other, together, 1), stepped(optimizer, model, 1))


def test_a_copied_optimizer_reduces_the_gradients_of_its_parameters(twin):
    model = make_model()
    halves = [list(model.parameters())[:3], list(model.parameters())[3:]]
    optimizer = hvd.DistributedOptimizer(
        SGD(model.parameters()), model.named_parameters(), groups=halves
    )
    other, copied = copy.deepcopy((model, optimizer))
    assert type(copied) is type(optimizer)
    launched = len(twin.communicator().lent)
    assert_equal(stepped(copied, other), stepped(optimizer, model))
    assert len(twin.communicator().lent) == launched + 4
    other[0].bias.requires_grad_(False)
    loss_of(other, 1).backward()
    other[2].bias.grad.add_(1)
    with pytest.raises(RuntimeError, match=r"'2\.bias' was changed"):
        copied.step()


def test_a_parameter_group_may_be_empty(twin):
    model = make_model()
    groups = [{"params": []}, {"params": model.parameters()}, {"params": []}]
    stepped(hvd.DistributedOptimizer(SGD(groups)), model)
    hvd.DistributedOptimizer(SGD([{"params": []}])).step()


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_scheduler_made_before_or_after_knows_whether_the_optimizer_has_stepped(twin, before):
    model = make_model()
    optimizer = SGD(model.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1)] if before else []
    hvd.DistributedOptimizer(optimizer)
    scheduler = (schedulers or [torch.optim.lr_scheduler.StepLR(optimizer, 1)])[0]
    stepped(optimizer, model)
    assert twin.communicator().lent
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    del optimizer._opt_called
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before"):
        scheduler.step()
