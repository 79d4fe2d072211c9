"""Who keeps whose copy, against all other choices, and which losses are survived."""

import itertools

import pytest

from megatron_hdp.runtime.copies import choose_common, choose_version, exposed, neighbours


def fewest_exposed(hosts):
    ranks = range(len(hosts))
    return min(
        sum(hosts[one] == hosts[keeper] for one, keeper in zip(ranks, keepers, strict=True))
        for keepers in itertools.permutations(ranks)
        if all(one != keeper for one, keeper in zip(ranks, keepers, strict=True))
    )


@pytest.mark.parametrize(
    "hosts",
    ["aabb", "abab", "aaab", "aaaa", "aabbc", "abcde", "abbbac", "ab", "aaaabb", "aaabbb", "abaab"],
)
def test_as_few_as_possible_keep_a_copy_of_their_own_host(hosts):
    keepers = neighbours(hosts)
    assert sorted(keepers) == list(range(len(hosts)))  # one copy each
    assert all(rank != keeper for rank, keeper in enumerate(keepers))
    assert len(exposed(hosts, keepers)) == fewest_exposed(hosts)


def test_ranks_that_share_experts_keep_no_copies_of_each_other():
    hosts, domains = "aabbccdd", [0, 0, 0, 0, 1, 1, 1, 1]
    keepers = neighbours(hosts, domains)
    assert all(domains[rank] != domains[keeper] for rank, keeper in enumerate(keepers))
    # a domain and a host that chain all together: the domain counts
    keepers = neighbours("abab", [0, 0, 1, 1])
    assert all(rank // 2 != keeper // 2 for rank, keeper in enumerate(keepers))
    assert neighbours("a") == (0,)


def held(members, keepers, dead, version=7):
    """What the survivors hold of one version, by member."""
    found = {uid: [[version, list(members), [uid]]] for uid in members if uid not in dead}
    for owner, keeper in zip(members, keepers, strict=True):
        if keeper in found:
            found[keeper][0][2].append(owner)
    return found


def test_any_host_may_die_but_not_two_neighbours():
    hosts = "aabbcc"
    members = (10, 11, 12, 13, 14, 15)
    keepers = [members[one] for one in neighbours(hosts)]
    for host in "abc":
        dead = {uid for uid, one in zip(members, hosts, strict=True) if one == host}
        chosen = choose_version(held(members, keepers, dead))
        assert (chosen.version, chosen.members) == (7, members)
    for first, second in itertools.combinations(range(6), 2):
        dead = {members[first], members[second]}
        is_lost = members[second] == keepers[first] or members[first] == keepers[second]
        assert (choose_version(held(members, keepers, dead)) is None) == is_lost


def test_the_newest_version_that_is_whole_is_taken_and_one_for_all_stages():
    members, keepers = (0, 1, 2), (1, 2, 0)
    old, new = held(members, keepers, {2}, 4), held(members, keepers, {2}, 5)
    new[0][0][2].remove(2)  # the dead rank's new shard had not reached its neighbour
    both = {uid: old[uid] + new[uid] for uid in old}
    assert choose_version(both).version == 4
    whole = {uid: old[uid] + held(members, keepers, {2}, 5)[uid] for uid in old}
    assert choose_version(whole).version == 5
    assert [one.version for one in choose_common([whole, both])] == [4, 4]
    assert choose_common([whole, new]) is None
    assert choose_version({}) is None


def test_of_one_version_the_safest_is_taken():
    """Member 3 has died; the three others have put the same version together anew."""
    before, anew = (0, 1, 2, 3), (0, 1, 2)
    found = {
        0: [[7, list(anew), [0, 2]], [7, list(before), [0, 3]]],
        1: [[7, list(anew), [0, 1]], [7, list(before), [0, 1]]],
        2: [[7, list(before), [1, 2]], [7, list(anew), [1, 2]]],
    }
    assert choose_version(found).members == anew
    assert [one.members for one in choose_common([found])] == [anew]
    for member, owned in found.items():  # not yet copied
        next(one for one in owned if one[1] == list(anew))[2][:] = [member]
    assert choose_version(found).members == before
