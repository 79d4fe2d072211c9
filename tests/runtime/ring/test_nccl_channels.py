"""What the rings' communicator asks NCCL for."""

import ctypes
from types import SimpleNamespace

import pytest

from megatron_hdp.runtime.ring.nccl_channels import ASKED, widen

V27, V28, V29, V30 = (2, 27, 7), (2, 28, 9), (2, 29, 7), (2, 30, 7)
UNSET = -(2**31)


class Structure(ctypes.Structure):
    """NCCL 2.30's ``ncclConfig_t``."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("blocking", "cgaClusterSize", "minCTAs", "maxCTAs")),
        ("netName", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("splitShare", "trafficClass")),
        ("commName", ctypes.c_char_p),
        *((name, ctypes.c_int) for name in ("collnetEnable", "CTAPolicy", "shrinkShare")),
        *((name, ctypes.c_int) for name in ("nvlsCTAs", "nChannelsPerNetPeer")),
        *((name, ctypes.c_int) for name in ("nvlinkCentricSched", "graphUsageMode", "numRmaCtx")),
        *((name, ctypes.c_int) for name in ("maxP2pPeers", "graphStreamOrdering")),
    ]


SIZE_OF = {V28: 80, V29: 88, V30: ctypes.sizeof(Structure)}


def config(version, max_ctas=16, **changes):
    """What torch gives that was compiled for a version, and the structure behind it."""
    fields = dict.fromkeys(
        (name for name, kind in Structure._fields_ if kind is ctypes.c_int), UNSET
    )
    code = version[0] * 10_000 + version[1] * 100 + version[2]
    fields |= {"size": SIZE_OF[version], "magic": 0xCAFEBEEF, "version": code, "maxCTAs": max_ctas}
    structure = Structure(**fields | changes)
    address = ctypes.addressof(structure)
    return SimpleNamespace(max_ctas=max_ctas, unsafe_get_ptr=lambda: address), structure


def changed(structure):
    names = ("nChannelsPerNetPeer", "maxP2pPeers", "numRmaCtx", "nvlsCTAs", "graphStreamOrdering")
    return {name: getattr(structure, name) for name in names if getattr(structure, name) != UNSET}


@pytest.mark.parametrize(
    ("built_for", "runs", "expected"),
    [
        (V28, V28, {"nChannelsPerNetPeer": 4}),
        (V29, V29, {"nChannelsPerNetPeer": 4}),
        (V30, V30, {"maxP2pPeers": 8}),
        (V30, V29, {"nChannelsPerNetPeer": 4}),
    ],
)
def test_the_field_that_the_library_knows_is_set(built_for, runs, expected):
    torchs, structure = config(built_for)
    said = widen(torchs, runs, {})
    assert said == " ".join(map(str, *expected.items())) and said in ASKED
    assert changed(structure) == expected


def test_what_is_not_the_known_structure_stays_as_it_is():
    for built_for, runs, changes, words in (
        (V30, V27, {}, "2.28 or newer"),
        (V28, V30, {}, "compiled for an NCCL without maxP2pPeers"),
        (V30, V30, {"magic": 1}, "without maxP2pPeers"),
        (V30, V30, {"maxCTAs": 3}, "not the known one"),
        (V30, V30, {"maxP2pPeers": 5}, "not the known one"),
    ):
        torchs, structure = config(built_for)
        for name, value in changes.items():
            setattr(structure, name, value)
        before = bytes(structure)
        assert words in widen(torchs, runs, {}) and bytes(structure) == before
    for name in ("NCCL_MAX_P2P_PEERS", "NCCL_NCHANNELS_PER_NET_PEER"):
        torchs, structure = config(V30)
        assert widen(torchs, V30, {name: "3"}) == f"{name}=3 decides" and not changed(structure)
    assert "torch does not say where" in widen(SimpleNamespace(max_ctas=16), V30, {})
    nowhere = SimpleNamespace(max_ctas=16, unsafe_get_ptr=lambda: 1)
    assert "Input/output error" in widen(nowhere, V30, {})
