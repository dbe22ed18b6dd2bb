"""The index agrees with what the safetensors library wrote, and refuses every file that is not
sound.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lema.errors import WeightsError
from lema.storage import GlobalBinaryIndex
from lema.storage.index import INDEX_NAME, SINGLE_NAME

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.tensor(7, dtype=torch.int64),
    "c": torch.randn(5).to(torch.bfloat16),
    "d": torch.zeros(0, 4, dtype=torch.float16),
    "e": torch.tensor([True, False]),
}


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def write_raw(file: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def write_sharded(directory: Path, weight_map: Any = None) -> Path:
    names = list(TENSORS)
    save_file(
        {name: TENSORS[name] for name in names[:2]}, directory / "model-00001-of-00002.safetensors"
    )
    save_file(
        {name: TENSORS[name] for name in names[2:]}, directory / "model-00002-of-00002.safetensors"
    )
    if weight_map is None:
        weight_map = {
            name: f"model-0000{1 if i < 2 else 2}-of-00002.safetensors"
            for i, name in enumerate(names)
        }
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def check_bytes(index: GlobalBinaryIndex) -> None:
    assert set(index) == set(TENSORS)
    for name, tensor in TENSORS.items():
        record = index[name]
        content = record.file.read_bytes()[record.offset : record.offset + record.nbytes]
        assert record.shape == tuple(tensor.shape)
        assert content == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert index.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_every_tensor_is_where_the_library_put_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / SINGLE_NAME, str(tmp_path)):
        check_bytes(index := GlobalBinaryIndex(path))
        assert index.root == tmp_path and index.metadata == {
            tmp_path / SINGLE_NAME: {"format": "pt"}
        }
        assert not index.in_memory_names


def test_a_sharded_model_is_one_index_over_all_files(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    for path in (tmp_path, tmp_path / INDEX_NAME):
        check_bytes(index := GlobalBinaryIndex(path))
        assert [file.name for file in index.files] == [
            f"model-0000{n}-of-00002.safetensors" for n in (1, 2)
        ]


def test_records_are_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {"z": entry(offsets=(0, 8)), "a": entry(offsets=(8, 16))}
    index = GlobalBinaryIndex(
        write_raw(tmp_path / SINGLE_NAME, dict(reversed(header.items())), b"\0" * 16)
    )
    assert list(index) == ["z", "a"]


def test_a_lone_file_of_another_name_is_the_model_but_an_adapter_is_not(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match="only adapter weights"):
        GlobalBinaryIndex(tmp_path)
    save_file(TENSORS, tmp_path / "weights.safetensors")
    check_bytes(GlobalBinaryIndex(tmp_path))
    save_file(TENSORS, tmp_path / "more.safetensors")
    with pytest.raises(WeightsError, match=r"no index: more\.safetensors, weights\.safetensors"):
        GlobalBinaryIndex(tmp_path)


HEADERS = {
    "not JSON": (b"{" * 9, "not begin with a safetensors header"),
    "deep JSON": (b'{"a":' * 100_000, "not begin with a safetensors header"),
    "not text": (b"\xff\xfe{}", "not begin with a safetensors header"),
    "not an object": ([1], "not an object"),
    "name twice": (b'{"t":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"t":{}}', "'t' twice"),
    "metadata not strings": ({"__metadata__": {"a": 1}, "t": entry()}, "__metadata__"),
    "entry not a map": ({"t": [1, 2]}, "'t' is not dtype, shape and data_offsets"),
    "entry too large": ({"t": entry() | {"more": 1}}, "'t' is not dtype, shape and data_offsets"),
    "unknown dtype": ({"t": entry(dtype="F33")}, "unknown dtype 'F33'"),
    "dtype not a name": ({"t": entry() | {"dtype": ["F32"]}}, "unknown dtype"),
    "negative size": ({"t": entry(shape=[-2, -1])}, "not a list of sizes"),
    "size is true": ({"t": entry(shape=[True, 2])}, "not a list of sizes"),
    "size is a float": ({"t": entry(shape=[2.0])}, "not a list of sizes"),
    "size is enormous": ({"t": entry(shape=[2**70])}, "not a list of sizes"),
    "offsets reversed": ({"t": entry(offsets=[8, 0])}, "not \\[begin, end\\]"),
    "three offsets": ({"t": entry(offsets=[0, 4, 8])}, "not \\[begin, end\\]"),
    "shape and bytes disagree": ({"t": entry(shape=[3])}, "needs 12 bytes but its offsets give 8"),
    "past the end": (
        {"t": entry(shape=[4], offsets=[0, 16])},
        "truncated: tensor 't' ends 8 bytes past",
    ),
    "overlap": ({"t": entry(), "u": entry(offsets=[0, 8])}, "'u' overlaps"),
    "gap": ({"t": entry(shape=[1], offsets=[4, 8])}, "'t' leaves a gap"),
    "bytes of no tensor": (
        {"t": entry(shape=[1], offsets=[0, 4])},
        "4 bytes at its end belong to no tensor",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_an_unsound_header_is_refused_with_the_file_and_the_tensor(
    tmp_path: Path, case: str
) -> None:
    header, message = HEADERS[case]
    file = write_raw(tmp_path / SINGLE_NAME, header)
    with pytest.raises(WeightsError, match=message) as caught:
        GlobalBinaryIndex(tmp_path)
    assert caught.value.where == str(file) and caught.value.how


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes long"),
        (b"\1\0", "2 bytes long"),
        ((200_000_000).to_bytes(8, "little") + b"{}", "claims 200000000 bytes, more than"),
        ((2**63).to_bytes(8, "little") + b"{}", "more than the 100000000 allowed"),
        ((50).to_bytes(8, "little") + b"{}", "claims 50 bytes but the file has only 10"),
    ],
)
def test_a_header_length_is_never_believed(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        GlobalBinaryIndex(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 8, 60, -1])
def test_a_truncated_file_is_refused_wherever_it_was_cut(tmp_path: Path, keep: int) -> None:
    save_file(TENSORS, tmp_path / SINGLE_NAME)
    whole = (tmp_path / SINGLE_NAME).read_bytes()
    (tmp_path / SINGLE_NAME).write_bytes(whole[:keep])
    with pytest.raises(WeightsError, match="damaged"):
        GlobalBinaryIndex(tmp_path)


def test_a_pickle_named_safetensors_is_refused(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / SINGLE_NAME)
    with pytest.raises(WeightsError, match="damaged"):
        GlobalBinaryIndex(tmp_path)


@pytest.mark.parametrize(
    "target",
    [
        "../outside.safetensors",
        "ABSOLUTE",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "x.bin",
        7,
        "\0.safetensors",
    ],
)
def test_a_weight_map_names_only_files_beside_it(tmp_path: Path, target: Any) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for file in (tmp_path / "outside.safetensors", model / "sub" / "x.safetensors"):
        save_file({"a": TENSORS["a"]}, file)
    target = str(tmp_path / "outside.safetensors") if target == "ABSOLUTE" else target
    (model / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": target}}))
    with pytest.raises(WeightsError, match="tensor 'a'") as caught:
        GlobalBinaryIndex(model)
    assert "weight_map['a']" in caught.value.where


@pytest.mark.parametrize("through", ["shard", "single", "index"])
def test_a_link_out_of_the_directory_is_refused(tmp_path: Path, through: str) -> None:
    model = tmp_path / "model"
    secret = tmp_path / "secret"
    model.mkdir()
    secret.mkdir()
    write_sharded(secret)
    save_file(TENSORS, secret / SINGLE_NAME)
    if through == "shard":
        (model / "x.safetensors").symlink_to(secret / SINGLE_NAME)
        (model / INDEX_NAME).write_text(
            json.dumps({"weight_map": dict.fromkeys(TENSORS, "x.safetensors")})
        )
    else:
        name = SINGLE_NAME if through == "single" else INDEX_NAME
        (model / name).symlink_to(secret / name)
    with pytest.raises(WeightsError, match="leaves its directory"):
        GlobalBinaryIndex(model)


def link_snapshot(tmp_path: Path, blobs: Path, *, via: Path | None = None) -> Path:
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs.mkdir(parents=True)
    save_file(TENSORS, blobs / "f00d")
    target = blobs / "f00d"
    if via is not None:
        via.parent.mkdir(parents=True)
        via.symlink_to(os.path.relpath(target, via.parent))
        target = via
    (snapshot / SINGLE_NAME).symlink_to(os.path.relpath(target, snapshot))
    return snapshot


def test_a_hub_snapshot_may_link_into_the_blobs_of_its_own_repository(tmp_path: Path) -> None:
    check_bytes(
        GlobalBinaryIndex(link_snapshot(tmp_path, tmp_path / "models--org--tiny" / "blobs"))
    )


def test_a_hub_snapshot_may_not_link_into_another_repository(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="leaves its directory"):
        GlobalBinaryIndex(link_snapshot(tmp_path, tmp_path / "models--org--other" / "blobs"))


@pytest.mark.parametrize("marked", [True, False])
def test_the_blob_store_shared_by_a_hub_cache_counts_only_if_marked(
    tmp_path: Path, marked: bool
) -> None:
    via = tmp_path / "models--org--tiny" / "blobs" / "etag"
    snapshot = link_snapshot(tmp_path, tmp_path / "blobs" / "f0", via=via)
    if marked:
        (tmp_path / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
        check_bytes(GlobalBinaryIndex(snapshot))
    else:
        with pytest.raises(WeightsError, match="leaves its directory"):
            GlobalBinaryIndex(snapshot)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        (
            '{"weight_map": {"a": "gone.safetensors", "b": "lost.safetensors"}}',
            r"2 files .* gone\.\w+, lost\.\w+",
        ),
    ],
)
def test_a_broken_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    with pytest.raises(WeightsError, match=message):
        GlobalBinaryIndex(tmp_path)


def test_all_broken_promises_of_an_index_are_named(tmp_path: Path) -> None:
    first = "model-00001-of-00002.safetensors"
    write_sharded(
        tmp_path,
        dict.fromkeys(TENSORS, first) | {"ghost": first, "e": "model-00002-of-00002.safetensors"},
    )
    with pytest.raises(WeightsError, match="3 tensors are not in the file") as caught:
        GlobalBinaryIndex(tmp_path)
    assert all(f"{name} (in {first})" in caught.value.what for name in ("c", "d", "ghost"))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file(
        {"a": TENSORS["a"], "c": TENSORS["c"], "d": TENSORS["d"], "e": TENSORS["e"]},
        tmp_path / "x.safetensors",
    )
    (tmp_path / INDEX_NAME).write_text(
        json.dumps({"weight_map": {"b": "model-00001-of-00002.safetensors", "c": "x.safetensors"}})
    )
    with pytest.raises(WeightsError, match="'a' is stored twice"):
        GlobalBinaryIndex(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    torch.save({}, tmp_path / name)
    with pytest.raises(WeightsError, match=name) as caught:
        GlobalBinaryIndex(tmp_path)
    assert "save_pretrained" in caught.value.how


def test_what_is_not_there_or_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="does not exist"):
        GlobalBinaryIndex(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match=r"no \.safetensors file"):
        GlobalBinaryIndex(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(WeightsError, match=r"notes\.txt is not a safetensors file"):
        GlobalBinaryIndex(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(WeightsError, match="not a regular file"):
        GlobalBinaryIndex(tmp_path / "pipe.safetensors")
    (tmp_path / SINGLE_NAME).symlink_to(tmp_path / "gone.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be opened"):
        GlobalBinaryIndex(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", [SINGLE_NAME, INDEX_NAME])
def test_a_file_that_may_not_be_read_is_an_error_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    (tmp_path / name).chmod(0)
    with pytest.raises(WeightsError, match=f"{name} cannot be opened"):
        GlobalBinaryIndex(tmp_path)


def test_reading_an_index_needs_no_torch() -> None:
    code = (
        "import sys, lema.storage.index, lema.storage.hub, lema.storage.tensorfile; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
