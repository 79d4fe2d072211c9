"""What lies in a checkpoint is data: nothing that reads it runs what it names."""

import io
import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from megatron_hdp.megatron.checkpoint import checksums, reading
from megatron_hdp.megatron.checkpoint.checksums import FileSum
from megatron_hdp.megatron.checkpoint.named_classes import ForeignClass, fault_of_list
from megatron_hdp.megatron.checkpoint.unpickling import foreign_class, read_list
from megatron_hdp.megatron.checkpoint.verification import verify
from tests.megatron.checkpoint.small import save_small

KEY = "common_state/shard_0_1"


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self._marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self._marker,)


def with_list(place, marker):
    (place / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def with_object(place, marker):
    shutil.rmtree(place)
    dcp.save({KEY: Evil(marker)}, storage_writer=dcp.FileSystemWriter(place), no_dist=True)


def load_object(place):
    """As Megatron 0.19 loads what ranks hold alike, and each release a module's own state."""
    with reading._explained(place):
        dcp.load({KEY: io.BytesIO()}, storage_reader=dcp.FileSystemReader(place), no_dist=True)


READERS = {
    "verify": (with_list, lambda place: verify(place, 4)),
    "convert": (with_list, read_list),
    "list": (with_list, load_object),
    "object": (with_object, load_object),
}


class Member:
    """Is written as Python 3.11.2 writes a member of an enumeration."""

    def __init__(self, kind, name):
        self._named = kind, name

    def __reduce__(self):
        return getattr, self._named


def test_members_of_enumerations_are_data_and_nothing_else_of_a_class_is(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps([WriteItemType.SHARD, Member(WriteItemType, "SHARD")]))
    assert read_list(tmp_path) == [WriteItemType.SHARD] * 2
    assert fault_of_list(tmp_path) is None
    for named in (Member(Metadata, "__init__"), Member(WriteItemType, "mro"), Member([], "append")):
        path.write_bytes(pickle.dumps(named))
        with pytest.raises(ForeignClass, match="found builtins.getattr of"):
            read_list(tmp_path)
    path.write_bytes(pickle.dumps(Member(Metadata, "__init__")))
    assert "found builtins.getattr of '__init__'" in fault_of_list(tmp_path)


def test_sums_of_a_list_prove_nothing(tmp_path):
    place = save_small(tmp_path, 4)
    assert verify(place, 4).is_good
    (place / checksums.SUMS).unlink()
    with_list(place, tmp_path / "x")
    checksums.merge(place, [{one.name: FileSum.of_file(one) for one in place.iterdir()}])
    verdict = verify(place, 4)
    assert verdict.has_checksums and not verdict.is_good and not (tmp_path / "x").exists()
    assert "found posix.mkdir, which may run code" in verdict.faults[0]


@pytest.mark.parametrize("name", READERS)
def test_nothing_that_a_checkpoint_names_is_run(tmp_path, name):
    place, marker = save_small(tmp_path, 4, with_checksums=False, common_file=False), tmp_path / "x"
    load_object(place)
    spoil, read = READERS[name]
    spoil(place, marker)
    try:
        found = str(read(place))
    except ValueError as error:
        found = str(error)
    assert not marker.exists()
    assert "found posix.mkdir, which may run code, expected data alone" in found


@pytest.mark.parametrize(
    "change",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'/tmp/x'\ntR.",
        b"cpathlib\nPosixPath.unlink\n.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'true'\ntR.",
        b"ctorch.serialization\n_get_layout.__globals__\n.",
    ],
)
def test_a_list_names_classes_of_lists_alone(tmp_path, change):
    (tmp_path / ".metadata").write_bytes(change)
    with pytest.raises(ValueError, match="may run code") as error:
        read_list(tmp_path)
    assert foreign_class(error.value, tmp_path) is error.value


def test_lists_of_older_and_newer_releases_are_read(tmp_path):
    place = save_small(tmp_path, 4)
    old = Metadata(read_list(place).state_dict_metadata, planner_data={"a": ("a", 0)})
    old.mcore_data = {}
    planner = DefaultSavePlanner()
    planner.set_up_planner({"a": torch.zeros(3), "b": "bytes"}, is_coordinator=True)
    old.all_local_plans = [planner.create_local_plan()]  # Megatron adds those of all ranks
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (place / ".metadata").write_bytes(pickle.dumps(old, protocol))
        assert vars(read_list(place)) == vars(old)
