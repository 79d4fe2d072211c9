"""Patches go in together or not at all, reach copies, and come out again."""

import sys
import types
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatron_hdp.megatron.lm.patching import Function, Patch, PatchError, PatchSet
from megatron_hdp.megatron.lm.releases import TESTED, everywhere

RELEASE = "1.0"


def doubled(original: Function, x: int, y: int = 0) -> int:
    return 2 * original(x, y)


def patch(target: str, parameters: object = None, replacement: Function = doubled) -> Patch:
    parameters = {RELEASE: ("x", "y")} if parameters is None else parameters
    return Patch(f"fake_{target}", "a test", parameters, replacement)  # type: ignore[arg-type]


def patch_set(*patches: Patch | str) -> PatchSet:
    """Of `RELEASE`; a text is a function of the library."""
    made = [patch(f"library:{one}") if isinstance(one, str) else one for one in patches]
    return PatchSet(made, (RELEASE,))


@pytest.fixture
def library() -> Iterator[types.ModuleType]:
    """A module with functions, and one that has imported them by value."""

    def add(x: int, y: int = 0) -> int:
        return x + y

    def subtract(x: int, y: int = 0) -> int:
        return x - y

    class Box:
        def add(self, y: int) -> int:
            return y

        @staticmethod
        def twice(x: int, y: int = 0) -> int:
            return x + x

    owner = types.ModuleType("fake_library")
    owner.add, owner.subtract, owner.Box = add, subtract, Box  # type: ignore[attr-defined]
    user = types.ModuleType("fake_user")
    user.plus = add  # type: ignore[attr-defined]
    sys.modules |= {"fake_library": owner, "fake_user": user}
    yield owner
    for name in ("fake_library", "fake_user"):
        del sys.modules[name]


class Stubborn(types.ModuleType):
    """A module whose names cannot be set anew."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in vars(self):
            super().__setattr__(name, value)


def test_a_copy_that_stays_is_an_error_and_nothing_is_replaced(library):
    add, subtract = library.add, library.subtract
    sys.modules["fake_user"] = stubborn = Stubborn("fake_user")
    stubborn.minus = subtract  # type: ignore[attr-defined]
    with pytest.raises(PatchError, match=r"fake_library:subtract: fake_user.minus kept the orig"):
        patch_set("add", "subtract").apply(RELEASE)
    assert (library.add, library.subtract) == (add, subtract)


def test_a_copy_is_replaced_too_and_all_is_as_before_after_reverting(library):
    user, originals = sys.modules["fake_user"], (library.add, library.subtract)
    patches = patch_set("add", "subtract")
    patches.apply(RELEASE)
    patches.apply(RELEASE)  # twice is once
    assert (library.add(1, 2), user.plus(1, 2), library.subtract(3, 1)) == (6, 6, 4)
    assert patches.is_applied
    patches.revert()
    patches.revert()
    assert (library.add, library.subtract) == originals
    assert user.plus is library.add and not patches.is_applied


def test_a_function_that_others_need_as_it_is_changes_for_its_owner_only(library):
    patches = patch_set(replace(patch("library:add"), owner_only=True))
    patches.apply(RELEASE)
    assert (library.add(1), sys.modules["fake_user"].plus(1)) == (2, 1)
    patches.revert()


def test_methods_keep_their_kind(library):
    def of_method(original: Function, self: object, y: int) -> int:
        return 10 * original(self, y)

    patches = patch_set("Box.twice", patch("library:Box.add", {RELEASE: ("self", "y")}, of_method))
    before = dict(vars(library.Box))
    patches.apply(RELEASE)
    assert (library.Box().twice(3), library.Box.twice(3), library.Box().add(2)) == (12, 12, 20)
    patches.revert()
    assert dict(vars(library.Box)) == before


@pytest.mark.parametrize(
    ("target", "parameters", "message"),
    [
        ("library:gone", None, "fake_library:gone: expected it to exist, found no gone"),
        ("nowhere:add", None, "fake_nowhere:add: expected it to exist, found No module"),
        ("library:Gone.add", None, "has no attribute 'Gone'"),
        ("library:add", {RELEASE: ("x",)}, r"parameters \(x\), found \(x, y\)"),
    ],
)
def test_one_patch_that_does_not_fit_keeps_all_out(library, target, parameters, message):
    original = library.subtract
    patches = patch_set("subtract", patch(target, parameters))
    with pytest.raises(PatchError, match=message):
        patches.apply(RELEASE)
    assert library.subtract is original and not patches.is_applied


def test_a_package_that_megatron_lacks_is_named_once(library, tmp_path, monkeypatch):
    """Its absence says nothing of the release."""
    (tmp_path / "fake_needy.py").write_text("import fake_six.moves\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    patches = patch_set("add", patch("needy:add"), patch("needy:subtract"))
    expected = "found no package fake_six, which Megatron imports: pip install fake_six"
    assert patches.problems(RELEASE) == [expected]
    with pytest.raises(PatchError, match=expected):
        patches.apply(RELEASE)


def test_each_release_has_its_own_signature_or_does_without(library):
    record = patch("library:add", {RELEASE: ("x", "y"), "3.0": ("z",)})
    both = patch("library:subtract", dict.fromkeys(("1.0", "2.0"), ("x", "y")))
    assert "expected the parameters (z), found (x, y)" in record.problem("3.0")
    patches = PatchSet([both, record], ("1.0", "2.0", "3.0"))
    assert patches.of(RELEASE) == [both, record] and patches.of("2.0") == [both]
    patches.apply("2.0")
    assert (library.add(1), library.subtract(3, 1)) == (1, 4)
    patches.revert()


def test_parameters_that_are_handed_on_may_be_any(library):
    patches = patch_set(patch("library:add", {RELEASE: None}))
    patches.apply(RELEASE)
    assert library.add(1) == 2
    patches.revert()


@pytest.mark.parametrize("version", ["0.19.2", "0.18.1", "0.16.9", "0.19.3rc1"])
def test_the_parameters_decide_on_a_version_of_a_known_release(library, version):
    """A patch level that was not tested is a note."""
    fits = patch("library:add", everywhere("x", "y"))
    patches = PatchSet([fits], TESTED)
    note = patches.apply(version)
    assert library.add(1, 2) == 6
    patches.revert()
    assert (note is None) == (version in TESTED)
    assert note is None or f"megatron-core {version} was not tested, only 0." in note
    changed = patch("library:subtract", everywhere("x", "z"))
    with pytest.raises(PatchError, match="fake_library:subtract: expected the parameters .x, z"):
        PatchSet([fits, changed], TESTED).apply(version)


@pytest.mark.parametrize("version", ["0.20.0", "0.15.3", "1.0.0", "unknown"])
def test_an_unknown_release_keeps_all_out(library, version):
    original = library.add
    patches = PatchSet([patch("library:add")], TESTED)
    expected = f"found megatron-core {version}, expected a version of 0.16, .* 0.19: pip install"
    with pytest.raises(PatchError, match=expected):
        patches.apply(version)
    assert library.add is original and not patches.is_applied


def test_what_somebody_patched_later_is_not_thrown_away(library):
    patches = patch_set("add", "subtract")
    patches.apply(RELEASE)
    ours, library.add = library.add, lambda x, y: 0
    with pytest.raises(PatchError, match=r"fake_library\.add changed after"):
        patches.revert()
    assert library.subtract(3, 1) == 4  # nothing was put back
    library.add = ours
    patches.revert()


def test_a_target_that_cannot_be_set_leaves_nothing_behind(library):
    class ReadOnly(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise KeyError(name)

    original, broken = library.add, ReadOnly("fake_user")
    vars(broken)["subtract"] = library.subtract
    sys.modules["fake_user"] = broken
    patches = patch_set("add", patch("user:subtract"))
    with pytest.raises(KeyError):
        patches.apply(RELEASE)
    assert library.add is original and not patches.is_applied
