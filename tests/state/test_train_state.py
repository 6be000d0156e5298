"""``TrainState``: a resumed run is the uninterrupted one, to the last bit."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

import ray_dcp as dcp
from ray_dcp.errors import ConfigError, StateDictError
from tests.ranks import ThreadRanks, require_no_errors
from tests.state.training import Net, differences, everything, load, net, save, train

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(optim.Adam, lr=0.01, amsgrad=True),
    "adamw foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adamw tensor lr": partial(optim.AdamW, lr=torch.tensor(0.01), foreach=False),
    "adagrad": partial(optim.Adagrad, lr=0.1),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "rmsprop": partial(optim.RMSprop, centered=True, momentum=0.5),
    "adafactor": optim.Adafactor,
    "lbfgs": partial(optim.LBFGS, lr=0.5, max_iter=3, history_size=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_is_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    model = net(seed=0)
    optimizer = make(model.parameters())
    train(model, optimizer, 0, 3)
    save(dcp.TrainState(model, optimizer), tmp_path)
    train(model, optimizer, 3, 6)

    other = net(seed=1)
    resumed = make(other.parameters())
    report = load(dcp.TrainState(other, resumed), tmp_path, strict="exact")
    assert report.unexpected == report.missing == ()
    train(other, resumed, 3, 6)
    assert differences(everything(other, resumed), everything(model, optimizer)) == []


def test_an_optimizer_that_has_stepped_already_is_put_back_in_place(tmp_path: Path) -> None:
    model = net(seed=0)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    state = dcp.TrainState(model, optimizer)
    save(state, tmp_path)
    expected = copy.deepcopy(everything(model, optimizer))
    exp_avg = optimizer.state[model.first.weight]["exp_avg"]
    train(model, optimizer, 2, 4)
    load(state, tmp_path)
    assert differences(everything(model, optimizer), expected) == []
    assert optimizer.state[model.first.weight]["exp_avg"] is exp_avg


def test_an_optimizer_that_has_not_stepped_has_no_step_in_the_checkpoint_or_after_it(tmp_path: Path) -> None:
    model = net(seed=0)
    optimizer = optim.AdamW(model.parameters())
    save(dcp.TrainState(model, optimizer), tmp_path)
    assert not optimizer.state
    other = net(seed=1)
    stepped = optim.AdamW(other.parameters())
    train(other, stepped, 0, 2)
    state = dcp.TrainState(other, stepped)
    load(state, tmp_path)
    assert differences(everything(other, stepped), everything(model, optimizer)) == []
    assert state.fresh == ()


def test_parameters_that_never_had_a_gradient_load_and_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net(seed=0)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    save(dcp.TrainState(model, optimizer), tmp_path)
    other = net(seed=1)
    resumed = optim.Adam(other.parameters())
    # This one's idle layer has had gradients: its state is not that of the run that is resumed.
    other.idle(torch.ones(5)).sum().backward()
    resumed.step()
    state = dcp.TrainState(other, resumed)
    load(state, tmp_path)
    assert state.fresh == ("idle.weight", "idle.bias")
    assert "idle.weight, idle.bias" in caplog.text
    assert other.idle.weight not in resumed.state
    assert differences(everything(other, resumed), everything(model, optimizer)) == []


def test_the_state_of_a_parameter_that_was_frozen_is_there_when_it_is_unfrozen(tmp_path: Path) -> None:
    model = net(seed=0)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    model.first.requires_grad_(False)
    train(model, optimizer, 2, 3)
    save(dcp.TrainState(model, optimizer), tmp_path)
    other = net(seed=1)
    other.first.requires_grad_(False)
    resumed = optim.Adam(other.parameters())
    load(dcp.TrainState(other, resumed), tmp_path)
    assert resumed.state[other.first.weight]["step"] == 2
    for unfrozen, its in ((model, optimizer), (other, resumed)):
        unfrozen.first.requires_grad_(True)
        train(unfrozen, its, 3, 5)
    assert differences(everything(other, resumed), everything(model, optimizer)) == []


def test_state_of_a_parameter_that_was_taken_out_of_its_group_is_kept(tmp_path: Path) -> None:
    def with_last_taken_out(model: Net, optimizer: optim.Optimizer) -> None:
        optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not model.last.weight]

    model = net(seed=0)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    with_last_taken_out(model, optimizer)
    save(dcp.TrainState(model, optimizer), tmp_path)
    other = net(seed=1)
    resumed = optim.Adam(other.parameters())
    train(other, resumed, 0, 1)
    with_last_taken_out(other, resumed)
    load(dcp.TrainState(other, resumed), tmp_path)
    expected = optimizer.state[model.last.weight]
    assert differences(dict(resumed.state[other.last.weight]), dict(expected)) == []


def groups_of(model: Net, order: str) -> list[dict[str, Any]]:
    groups = {
        "f": {"params": list(model.first.parameters()), "lr": 0.3},
        "l": {"params": list(model.last.parameters()), "lr": 0.02, "weight_decay": 0.5},
        "i": {"params": [*model.idle.parameters()], "lr": 0.001},
        "-": {"params": [], "lr": 7.0},
    }
    return [groups[one] for one in order]


@pytest.mark.parametrize("order", ["fl-i", "ilf-", "-lif"])
def test_groups_are_found_by_their_parameters(order: str, tmp_path: Path) -> None:
    """Also empty ones, and with schedules whose lists follow the groups."""
    made: list[tuple[Net, optim.Optimizer, Any]] = []
    for seed, groups in ((0, "fl-i"), (1, order)):
        model = net(seed)
        optimizer = optim.SGD(groups_of(model, groups), lr=1.0, momentum=0.9)
        factors = [lambda step, of=one: {"f": 0.5, "l": 0.7, "i": 1.0, "-": 1.0}[of] ** step for one in groups]
        made.append((model, optimizer, lr_scheduler.LambdaLR(optimizer, factors)))
    (model, optimizer, schedule), (other, resumed, its_schedule) = made
    train(model, optimizer, 0, 3, schedule)
    save(dcp.TrainState(model, optimizer, schedule), tmp_path)
    for group in resumed.param_groups:
        group["lr"] = 99.0
    load(dcp.TrainState(other, resumed, its_schedule), tmp_path)
    for each in made:
        train(each[0], each[1], 3, 5, each[2])
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    place = {one: i for i, one in enumerate("fl-i")}
    expected = [optimizer.param_groups[place[one]] for one in order]
    for mine, theirs in zip(resumed.param_groups, expected, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    assert its_schedule.get_last_lr() == [group["lr"] for group in expected]


def test_a_group_that_joins_parameters_of_different_settings_is_refused(tmp_path: Path) -> None:
    model = net(seed=0)
    save(dcp.TrainState(model, optim.SGD(groups_of(model, "fli"), lr=1.0)), tmp_path)
    joined = dcp.TrainState(model, optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(dcp.CheckpointException, match=r"group 0: first\.weight and .*idle\.weight.* different lr"):
        load(joined, tmp_path)


def test_a_group_may_be_split(tmp_path: Path) -> None:
    model = net(seed=0)
    optimizer = optim.Adam(model.parameters(), lr=0.5)
    train(model, optimizer, 0, 2)
    save(dcp.TrainState(model, optimizer), tmp_path)
    other = net(seed=1)
    weights = [p for p in other.parameters() if p.dim() > 1]
    resumed = optim.Adam([{"params": weights}, {"params": [p for p in other.parameters() if p.dim() == 1]}], lr=0.1)
    load(dcp.TrainState(other, resumed), tmp_path)
    assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.5]
    for each in ((model, optimizer), (other, resumed)):
        train(*each, 2, 4)
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []


SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "plateau": lambda o: _Plateau(o),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "swa": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


class _Plateau(lr_scheduler.ReduceLROnPlateau):
    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__(optimizer, patience=0)

    def step(self, *_: Any) -> None:
        super().step(1.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    made = []
    for seed in (0, 1):
        model = net(seed)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made.append((model, optimizer, SCHEDULES[name](optimizer)))
    (model, optimizer, schedule), (other, resumed, its_schedule) = made
    train(model, optimizer, 0, 3, schedule)
    save(dcp.TrainState(model, optimizer, schedule), tmp_path)
    load(dcp.TrainState(other, resumed, its_schedule), tmp_path)
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for each in made:
        train(each[0], each[1], 3, 7, each[2])
    assert differences(everything(other, resumed, its_schedule), everything(model, optimizer, schedule)) == []


def test_a_tensor_learning_rate_stays_the_tensor_that_it_is(tmp_path: Path) -> None:
    model = net(seed=0)
    save(dcp.TrainState(model, optim.Adam(model.parameters(), lr=0.25)), tmp_path)
    rate = torch.tensor(0.5)
    optimizer = optim.Adam(model.parameters(), lr=rate)
    load(dcp.TrainState(model, optimizer), tmp_path)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25
    save(dcp.TrainState(model, optimizer), tmp_path)
    plain = optim.Adam(model.parameters(), lr=0.125)
    load(dcp.TrainState(model, plain), tmp_path)
    assert plain.param_groups[0]["lr"] == 0.25
    assert type(plain.param_groups[0]["lr"]) is float


WRAPPINGS = {
    "plain": lambda model: model,
    "compiled": torch.compile,
    "checkpointed": lambda model: _with_last_wrapped(model, checkpoint_wrapper),
    "compiled within": lambda model: _with_last_wrapped(model, torch.compile),
    "compiled within checkpointed": lambda model: _with_last_wrapped(
        model, lambda m: checkpoint_wrapper(torch.compile(m))
    ),
    "data parallel": nn.DataParallel,
}


def _with_last_wrapped(model: Net, wrap: Any) -> Net:
    model.last = wrap(model.last)
    return model


@pytest.mark.parametrize("after", WRAPPINGS)
@pytest.mark.parametrize("before", ["plain", "compiled within checkpointed", "data parallel"])
def test_a_checkpoint_moves_between_wrappings(before: str, after: str, tmp_path: Path) -> None:
    model = net(seed=0)
    plain = copy.deepcopy(model)
    optimizer = optim.Adam(model.parameters())
    wrapped = WRAPPINGS[before](model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save(dcp.TrainState(wrapped, optimizer), tmp_path)
    other = net(seed=1)
    resumed = optim.Adam(other.parameters())
    report = load(dcp.TrainState(WRAPPINGS[after](other), resumed), tmp_path, strict="exact")
    assert {f"app.model.{name}" for name in plain.state_dict()} <= set(report.loaded)
    assert "app.optim.state.last.weight.exp_avg" in report.loaded
    assert "app.optim.param_groups.first.weight" in report.loaded
    assert differences(resumed.state_dict(), optimizer.state_dict()) == []
    assert differences(list(other.state_dict().values()), list(model.state_dict().values())) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(inputs @ self.embed.weight)


def test_tied_parameters_stay_tied_and_have_one_state(tmp_path: Path) -> None:
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Tied()
        made.append((model, optim.Adam(model.parameters())))
    train(*made[0], 0, 2)
    save(dcp.TrainState(*made[0]), tmp_path)
    load(dcp.TrainState(*made[1]), tmp_path)
    assert made[1][0].head.weight is made[1][0].embed.weight
    for each in made:
        train(*each, 2, 4)
    assert differences(everything(*made[1]), everything(*made[0])) == []


def test_several_models_optimizers_and_schedules_go_by_name(tmp_path: Path) -> None:
    made = []
    for seed in (0, 1):
        models = {"one": net(seed), "two": net(seed + 10)}
        optimizers = {
            "a": optim.Adam(models["one"].parameters()),
            "b": optim.SGD(models["two"].parameters(), momentum=0.9),
        }
        schedules = [lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers.values()]
        made.append((models, optimizers, schedules))
    for models, optimizers, schedules in made[:1]:
        train(models["one"], optimizers["a"], 0, 2, schedules[0])
        train(models["two"], optimizers["b"], 0, 3, schedules[1])
    save(dcp.TrainState(*made[0]), tmp_path)
    report = load(dcp.TrainState(*made[1]), tmp_path)
    assert "app.optim.a.state.one.first.weight.step" in report.loaded
    for (model, other), (its, others), (schedule, other_schedule) in zip(
        zip(*(m[0].values() for m in made), strict=True),
        zip(*(m[1].values() for m in made), strict=True),
        zip(*(m[2] for m in made), strict=True),
        strict=True,
    ):
        assert differences(everything(other, others, other_schedule), everything(model, its, schedule)) == []


def test_what_else_a_step_changes_comes_along(tmp_path: Path) -> None:
    made = []
    for seed in (0, 1):
        model = net(seed)
        ema = AveragedModel(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0 + seed)
        optimizer = optim.AdamW(model.parameters())
        state = dcp.TrainState(model, optimizer, ema=ema, scaler=scaler, best=[0.5 + seed, {}], step=seed)
        made.append((model, optimizer, ema, scaler, state))
    model, optimizer, ema, _, state = made[0]
    train(model, optimizer, 0, 2)
    ema.update_parameters(model)
    ema.update_parameters(net(seed=7))
    save(state, tmp_path)
    other, _, its_ema, its_scaler, resumed = made[1]
    load(resumed, tmp_path)
    assert differences(dict(its_ema.state_dict()), dict(ema.state_dict())) == []
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    assert its_scaler.get_scale() == 16.0
    assert resumed.more["best"][0] == 0.5
    assert resumed.more["step"] == 0


def test_a_parameter_that_is_in_no_model_is_refused(tmp_path: Path) -> None:
    model = net(seed=0)
    stranger = nn.Parameter(torch.ones(2, 3))
    optimizer = optim.SGD([*model.parameters(), stranger], lr=0.1)
    with pytest.raises(dcp.CheckpointException, match=r"parameter 7 of group 0, shape \(2, 3\), is not in the model"):
        save(dcp.TrainState(model, optimizer), tmp_path)
    assert not (tmp_path / ".metadata").exists()


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    model = net(seed=0)
    save(dcp.TrainState(model, optim.SGD(model.parameters(), lr=0.1)), tmp_path)
    with torch.device("meta"):
        bare = Net()
    with pytest.raises(dcp.CheckpointException, match=r"first\.weight.*to_empty"):
        load(dcp.TrainState(bare, optim.SGD(bare.parameters(), lr=0.1)), tmp_path)


@pytest.mark.parametrize(
    "arguments", [{"model": 3}, {"optimizer": [1]}, {"optim": 5}], ids=["model", "optimizer", "taken name"]
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        dcp.TrainState(**{"model": net(0)} | arguments)


def test_a_checkpoint_without_the_optimizer_is_missing_it_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net(seed=0)
    save(dcp.TrainState(model), tmp_path)
    other = net(seed=1)
    optimizer = optim.Adam(other.parameters(), lr=0.5)
    train(other, optimizer, 0, 2)
    expected = copy.deepcopy(optimizer.state_dict())
    state = dcp.TrainState(other, optimizer)
    with pytest.raises(
        dcp.CheckpointException, match=r"app\.optim\.param_groups\.first\.weight: .*not in the checkpoint"
    ):
        load(state, tmp_path)
    load(state, tmp_path, strict=False)
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    assert differences(optimizer.state_dict(), expected) == []
    assert "first.weight" in caplog.text


def test_what_is_left_out_of_a_load_is_not_made_up(tmp_path: Path) -> None:
    model = net(seed=0)
    optimizer = optim.Adam(model.parameters(), lr=0.25)
    train(model, optimizer, 0, 2)
    save(dcp.TrainState(model, optimizer), tmp_path)
    other = net(seed=1)
    resumed = optim.Adam(other.parameters(), lr=0.5)
    train(other, resumed, 0, 1)
    before = copy.deepcopy(resumed.state_dict())
    state = dcp.TrainState(other, resumed)
    load(state, tmp_path, only="app.model")
    assert differences(resumed.state_dict(), before) == []
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    load(state, tmp_path, skip="app.optim.state.first")
    assert "first.weight" in state.fresh
    assert other.first.weight not in resumed.state
    assert resumed.param_groups[0]["lr"] == 0.25
    assert differences(dict(resumed.state[other.last.weight]), dict(optimizer.state[model.last.weight])) == []


def test_an_optimizer_that_is_left_out_of_a_load_is_not_said_to_start_fresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net(seed=0)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    state = dcp.TrainState(model, optimizer)
    save(state, tmp_path)
    load(state, tmp_path, skip="app.optim")
    assert "fresh" not in caplog.text
    assert "the optimizer of these parameters stays as it was" in caplog.text
    assert "first.weight" in state.fresh
    caplog.clear()
    load(state, tmp_path, skip="app.optim.state.first")
    assert "they start fresh: first.weight" in caplog.text
    assert "stays as it was" not in caplog.text


def test_a_checkpoint_of_other_names_is_renamed_on_the_way(tmp_path: Path) -> None:
    model = net(seed=0)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    dcp.save({"trainer": dcp.TrainState(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    other = net(seed=1)
    resumed = optim.Adam(other.parameters())
    load(dcp.TrainState(other, resumed), tmp_path, rename={r"^trainer\.": "app."})
    assert differences(everything(other, resumed), everything(model, optimizer)) == []


def test_the_state_keeps_its_dtype_when_the_parameter_has_another(tmp_path: Path) -> None:
    model = net(seed=0).to(torch.bfloat16)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "momentum_buffer": torch.rand_like(parameter, dtype=torch.float32),
            "note": "text",
        }
    save(dcp.TrainState(model, optimizer), tmp_path)
    other = net(seed=1).to(torch.bfloat16)
    resumed = optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    load(dcp.TrainState(other, resumed), tmp_path)
    assert differences(resumed.state_dict(), optimizer.state_dict()) == []


def test_torch_s_own_load_into_an_optimizer_that_has_not_stepped_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as torch_dcp

    model = net(seed=0)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, 0, 2)
    save(dcp.TrainState(model, optimizer), tmp_path)
    other = net(seed=1)
    resumed = optim.Adam(other.parameters())
    with pytest.raises(StateDictError, match=r"not loaded.*first\.weight"):
        torch_dcp.load({"app": dcp.TrainState(other, resumed)}, checkpoint_id=tmp_path, no_dist=True)
    train(other, resumed, 0, 1)
    torch_dcp.load({"app": dcp.TrainState(other, resumed)}, checkpoint_id=tmp_path, no_dist=True)
    assert differences(everything(other, resumed), everything(model, optimizer)) == []


@pytest.mark.parametrize("flat", [False, True])
def test_what_torch_s_get_state_dict_has_saved_loads(flat: bool, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = net(seed=0)
    optimizer = optim.AdamW(groups_of(model, "fl"), lr=0.5)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(model, optimizer, 0, 2, schedule)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optim": optimizer_state, "scheduler": schedule.state_dict()}
    dcp.save({"app": state}, checkpoint_id=tmp_path, no_dist=True)
    other = net(seed=1)
    resumed = optim.AdamW(groups_of(other, "lf"), lr=0.1)
    its_schedule = lr_scheduler.ExponentialLR(resumed, 0.9)
    load(dcp.TrainState(other, resumed, its_schedule), tmp_path)
    for each in ((model, optimizer, schedule), (other, resumed, its_schedule)):
        train(each[0], each[1], 2, 4, each[2])
    assert differences(dict(other.state_dict()), dict(model.state_dict())) == []
    assert [g["lr"] for g in resumed.param_groups] == [g["lr"] for g in reversed(optimizer.param_groups)]


def stages(names: str, seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(3, 3) for name in names})


def stepped(model: nn.Module, num_steps: int) -> tuple[nn.Module, optim.Optimizer, Any]:
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def test_ranks_with_different_parts_of_a_model_save_and_load_together(tmp_path: Path) -> None:
    """Stages of a pipeline: each rank's optimizer has the parameters of its own, under their names in the whole."""
    split = [stepped(stages("ab", 1), 2), stepped(stages("cd", 2), 2)]
    require_no_errors(ThreadRanks(2).save(lambda rank: {"app": dcp.TrainState(*split[rank])}, tmp_path / "split"))
    whole = stepped(stages("abcd", 3), 0)
    load(dcp.TrainState(*whole), tmp_path / "split", strict="exact")
    for part in split:
        for name, parameter in part[0].named_parameters():
            mine = dict(whole[0].named_parameters())[name]
            assert torch.equal(mine, parameter)
            assert differences(dict(whole[1].state[mine]), dict(part[1].state[parameter])) == []
    assert whole[1].param_groups[0]["lr"] == whole[2].get_last_lr()[0] == 0.025
    save(dcp.TrainState(*whole), tmp_path / "whole")
    again = [stepped(stages("abc", 4), 0), stepped(stages("d", 5), 1)]
    outcomes = ThreadRanks(2).load([{"app": dcp.TrainState(*part)} for part in again], tmp_path / "whole")
    require_no_errors(outcomes)
    found = {name: value for part in again for name, value in part[0].state_dict().items()}
    assert differences(found, dict(whole[0].state_dict())) == []
    assert [part[1].param_groups[0]["lr"] for part in again] == [0.025, 0.025]
    assert all(values["step"] == 2 for part in again for values in part[1].state.values())


def test_a_parameter_on_meta_is_named_as_the_model_has_it():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    with pytest.raises(StateDictError, match=r"on the meta device: weight, bias\. Call"):
        dcp.TrainState(model).template_for({})
