"""Collectives of `torch_xla` go over the right groups, and every rank names the same ones."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from neurondoubles import RecordedXm
from neuronmodels import batch, lora, whole_model

import lema_neuron
import lema_neuron.peft as parallel
from lema.errors import ConfigError, DataError
from lema_neuron.comm import Solo, XlaComm
from lema_neuron.gradients import global_norm, reduce_gradients
from lema_neuron.layers import GQAQKVColumnParallelLinear
from lema_neuron.mappings import copy_to_group, gather_sequence, reduce_scatter_sequence
from lema_neuron.parallelize import parallelize

TENSOR = [[0, 1, 2, 3], [4, 5, 6, 7]]  # two replicas of a model over four ranks each
LAYERS = 2
DATA = [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_every_collective_names_all_groups_and_pins_no_layout() -> None:
    xm = RecordedXm()
    comm = XlaComm(TENSOR, xm, 6)
    assert (comm.rank, comm.size) == (2, 4)
    x = torch.ones(8, 4)
    comm.all_reduce(x)
    comm.all_gather(x, -1)
    comm.reduce_scatter(x, -2)
    comm.broadcast(x, 1)
    comm.barrier()
    assert [name for name, _ in xm.calls] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "rendezvous",
    ]
    assert all(
        given["groups"] == TENSOR and given["pin_layout"] is False for _, given in xm.calls[:-1]
    )
    assert [given.get("dim") for _, given in xm.calls[1:3]] == [1, 0]
    assert torch.equal(x, torch.ones(8, 4))  # out of place


def test_parts_of_a_group_are_named_for_all_groups() -> None:
    xm = RecordedXm()
    for ordinal, rank in ((0, 0), (5, 0), (7, 1)):
        part = XlaComm(TENSOR, xm, ordinal).split([(0, 2), (1, 3)])
        assert (part.rank, part.size) == (rank, 2)
        part.all_reduce(torch.ones(2))
    assert all(given["groups"] == [[0, 2], [1, 3], [4, 6], [5, 7]] for _, given in xm.calls)


def test_a_rank_in_no_group_and_a_length_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank 9 is in none"):
        XlaComm(TENSOR, RecordedXm(), 9)
    with pytest.raises(DataError, match="7 positions cannot be cut into 4"):
        XlaComm(TENSOR, RecordedXm(), 0).reduce_scatter(torch.ones(7), 0)


@pytest.mark.parametrize(
    ("mapping", "there", "back"),
    [
        (lambda x, comm: copy_to_group(x, comm), [], ["all_reduce"]),
        (lambda x, comm: gather_sequence(x, comm, 0), ["all_gather"], ["reduce_scatter"]),
        (lambda x, comm: gather_sequence(x, comm, 0, partial=False), ["all_gather"], []),
        (lambda x, comm: reduce_scatter_sequence(x, comm, 0), ["reduce_scatter"], ["all_gather"]),
    ],
    ids=["copy", "gather-partial", "gather-whole", "reduce-scatter"],
)
def test_what_goes_one_way_forward_comes_back_another(
    mapping: object, there: list[str], back: list[str]
) -> None:
    xm = RecordedXm()
    x = torch.ones(8, 2, requires_grad=True)
    y = mapping(x, XlaComm(TENSOR, xm, 1))  # type: ignore[operator]
    assert [name for name, _ in xm.calls] == there
    y.sum().backward()
    assert [name for name, _ in xm.calls] == there + back
    assert x.grad is not None and x.grad.shape == x.shape


def run_a_step(ordinal: int, sequence: bool) -> list[tuple[str, dict[str, object]]]:
    """A forward and backward pass of one rank of eight, its reductions and its norm; what it
    asked of `xm`.
    """
    xm = RecordedXm()
    tensor = XlaComm(TENSOR, xm, ordinal)
    model = whole_model("llama", 2, layers=LAYERS)
    parallelize(model, tensor, sequence_parallel=sequence)
    over = parallel.get_peft_model(model, lora("llama"), seed=1)
    xm.calls.clear()
    over(**batch()).loss.backward()
    xm.calls.append(("gradients", {}))
    trained = [parameter for parameter in over.parameters() if parameter.requires_grad]
    reduce_gradients(trained)
    global_norm(trained, tensor)
    return xm.calls


@pytest.mark.parametrize("sequence", [False, True], ids=["tokens", "sequence"])
def test_all_ranks_ask_for_the_same_in_the_same_order(sequence: bool) -> None:
    first = run_a_step(0, sequence)
    assert run_a_step(6, sequence) == first
    after = [given["groups"] for name, given in first[first.index(("gradients", {})) + 1 :]]
    sharing = [[0, 2], [1, 3], [4, 6], [5, 7]]
    # factors, keys, the norm
    assert sorted(map(str, after)) == sorted(map(str, [TENSOR, sharing, TENSOR]))
    assert after[-1] == TENSOR  # the norm is that of gradients that are reduced
    during = [name for name, given in first[: first.index(("gradients", {}))]]
    assert set(during) == ({"all_gather", "reduce_scatter"} if sequence else {"all_reduce"})
    ends = 2  # of a block; and two rows of it, the weight's and the adapter's
    assert len(during) == (LAYERS * 2 * 2 * (1 + ends) if sequence else LAYERS * 2 * (1 + ends) - 1)
    # the embeddings are frozen: no gradient is summed where the first block begins; the last layer
    # gathers all tokens


def test_copies_of_a_layer_lie_over_the_same_processes() -> None:
    comm = XlaComm(TENSOR, RecordedXm(), 0)
    layer = GQAQKVColumnParallelLinear(
        8, [16, 8], gather_output=False, tensor_model_parallel_group=comm
    )
    assert copy.deepcopy(layer).comm is comm
    assert Solo().split([(0,)]).size == 1


def test_nothing_of_the_device_is_imported_where_a_module_begins() -> None:
    """Its packages are imported in functions only; there are none on this machine, so that a
    test would not show it.
    """
    kit = {"torch_xla", "neuronx_distributed", "torch_neuronx", "optimum"}
    files = sorted(Path(lema_neuron.__file__).parent.rglob("*.py"))
    assert len(files) > 15
    for file in files:
        for node in ast.parse(file.read_text()).body:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not kit & {name.partition(".")[0] for name in names}, file
