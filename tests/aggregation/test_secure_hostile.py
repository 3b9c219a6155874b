"""Secure aggregation against servers and clients that violate the protocol: each is refused and named."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from masked_sums import agrees, federation, names, step
from scipy import stats

from fedfm.aggregation import _secagg_keys as side
from fedfm.aggregation._secagg import SecAgg
from fedfm.aggregation._secagg_client import short
from fedfm.aggregation.secure import Secure
from fedfm.core.client import Client, on_client
from fedfm.errors import RunError
from fedfm.linalg.params import Params
from fedfm.privacy.crypto import keys

SEALED = torch.empty(0, 96, dtype=torch.uint8)


def refusals(fed, link, method, t=1):
    """What the clients answer to a server that goes on as far as it gets."""
    with pytest.raises(RunError):
        step(fed, method, t)
    return [str(reply.fault.reason) for _, reply in link.heard if reply.fault is not None]


def changed(message, client=None, **values):
    """Change one message's payload, for one client or all; a callable makes the value of the old one."""

    def change(request):
        if not request.handler.endswith("_" + message) or (client and request.client != client):
            return request
        new = {k: v(request.payload[k]) if callable(v) else v for k, v in values.items()}
        return request._replace(payload={**request.payload, **new})

    return change


def named(status, at, value):
    status = status.clone()
    status[at] = value
    return status


# --- survivors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [("c03", "c04"), ("c01", "c02", "c03", "c04")])
def test_one_client_named_both_alive_and_dead_is_revealed_by_nobody(half, tmp_path):
    """c01 dropped out. Some hear that c00 did, too: to them the server shows signatures of the others."""
    fed, link, method = federation(tmp_path, 7, Secure(threshold=0.5))
    link.late["give"] = {"c06"}

    def split(request):
        if request.handler.rpartition("_")[2] not in ("consent", "unmask") or request.client not in half:
            return request
        status, seals = named(request.payload["status"], 0, side.DEAD), request.payload["seals"][1:]
        return request._replace(payload={**request.payload, "status": status, "seals": seals})

    link.change = split
    found = refusals(fed, link, method)
    other, dead = "signed another list of survivors", "c00 is not a member that survived"
    assert sum(other in reason or dead in reason for reason in found) == len(link.replies("unmask")) == 6


def test_without_dropouts_nobody_reveals_the_masks_of_a_client_as_dropped_out(tmp_path):
    """The server skips the consent: it claims that c00 dropped out, or that c00 was in no cohort."""
    for value, reason in (
        (side.DEAD, "1 signatures of the survivors arrived, 4 are needed"),
        (side.OUT, "for this cohort"),
    ):
        fed, link, method = federation(tmp_path / str(value), 5)
        link.change = changed("unmask", status=lambda s, value=value: named(s, 0, value), seals=lambda s: s[1:])
        assert sum(reason in found for found in refusals(fed, link, method)) >= 4


def test_a_second_list_of_survivors_and_a_second_reveal_are_refused(tmp_path):
    """After an honest sum the server asks for the other share of c00, in every way it has."""
    for dropped in (set(), {"c04"}):
        fed, link, method = federation(tmp_path / str(len(dropped)), 5, Secure(threshold=0.5))
        link.late["give"] = dropped
        step(fed, method, 1)
        (unmask,) = [r for r in link.sent if r.handler.endswith("_unmask") and r.client == "c01"]
        told = {k: unmask.payload[k] for k in ("sum", "status", "seals")}
        other = told | {"status": named(told["status"], 0, side.DEAD), "seals": told["seals"][1:]}
        consent = unmask._replace(handler="aggregate.SecAgg_consent", payload=told)
        again = [unmask, consent, consent._replace(payload=other)]
        again.append(unmask._replace(payload={**unmask.payload, **other}))
        reasons = []
        for call in (unmask.call - 1, unmask.call, unmask.call + 1, 99):  # also to the memories of earlier messages
            for request in again:
                (reply,) = link.exchange([request._replace(call=call)])
                assert reply.fault is not None, (call, request.handler)
                assert reply.fault.code == "E_REFUSED"
                reasons.append(reply.fault.reason)
        for wanted in (
            "requested a list of survivors for sum 0 again",
            "requested shares for sum 0 again",
            "agreed to another list of survivors",
        ):
            assert any(wanted in reason for reason in reasons), wanted


def test_a_small_sum_is_refused_by_the_clients(tmp_path):
    """The server names two survivors of five, although its own check would stop it."""
    fed, link, method = federation(tmp_path, 5, Secure(threshold=0.5))
    two = lambda status: torch.tensor([2, 2, 1, 1, 1], dtype=torch.uint8)  # noqa: E731
    link.change = changed("unmask", status=two, seals=lambda s: s[:2])
    found = refusals(fed, link, method)
    assert sum("the sum has 2 clients, expected at least 3" in reason for reason in found) == 2
    assert len(found) == 5


@pytest.mark.parametrize(("least", "at"), [(4, "mask"), (6, "share")])
def test_a_silo_takes_part_in_no_smaller_cohort_than_its_own_file_says(least, at, tmp_path):
    """5 silos have keys, a cohort is of 3."""
    own = {"c01": {"smallest_cohort": least}}
    fed, link, method = federation(tmp_path, 5, own=own)
    link.change = changed("give", **{"+told": lambda told: replace(told, cohort=torch.tensor([1, 1, 1, 0, 0]).byte())})
    found = refusals(fed, link, method)
    members = 3 if at == "mask" else 5
    assert sum(f"the sum has {members} clients, expected at least {least}" in reason for reason in found) == 1


def test_a_silo_reveals_nothing_for_fewer_survivors_than_its_own_file_says(tmp_path):
    own = {name: {"smallest_cohort": 5} for name in names(5)}
    fed, link, method = federation(tmp_path, 5, own=own)
    agrees(step(fed, method, 1), names(5), 1, method)
    link.late["give"] = {"c02"}
    assert sum("the sum has 4 clients, expected at least 5" in found for found in refusals(fed, link, method, 2)) == 4


@given(st.integers(3, 40), st.integers(0, 12), st.data())
def test_a_list_of_survivors_splits_if_no_chain_of_masks_leads_from_one_to_all(n, neighbours, data):
    agreed = side.Agreed("", "", names(n), torch.zeros(n, 1, dtype=torch.uint8), neighbours)
    status = bytes(data.draw(st.lists(st.sampled_from([side.OUT, side.DEAD, side.ALIVE]), min_size=n, max_size=n)))
    cohort = {p for p in range(n) if status[p] != side.OUT}
    alive = {p for p in cohort if status[p] == side.ALIVE}
    assume(len(cohort) > 2)
    found, ahead = set(), sorted(alive)[:1]
    while ahead:
        found.add(p := ahead.pop())
        ahead += (alive & {*agreed.around(p, cohort)}) - found
    assert agreed.splits(status) == (found != alive)


@pytest.mark.parametrize("silo", [False, True])
def test_no_sum_of_a_part_of_the_survivors_can_be_read(silo, tmp_path, monkeypatch):
    """Of ten silos in a ring the server leaves out two pairs: three on one side, three on the other have no masks in
    common. Each silo asks for six.
    """
    own = {name: {"smallest_cohort": 6} for name in names(10)}
    fed, link, method = federation(tmp_path, 10, Secure(threshold=0.5, neighbours=4), own=own)
    agree = SecAgg._agree

    def dropping(self, fed):
        session = agree(self, fed)
        ring = [session.agreement.names[p] for p in session.agreement.ring]
        link.late["give"] = {*ring[:2], *ring[5:7]}
        if silo:  # a server that goes on; each client makes an agreement of its own
            session.agreement.splits = lambda status: False
        return session

    monkeypatch.setattr(SecAgg, "_agree", dropping)
    with pytest.raises(RunError, match="aggregation.neighbours" if not silo else "SecAgg_consent"):
        step(fed, method, 1)
    asked = link.replies("consent")
    assert len(asked) == (6 if silo else 0)
    assert all("sums of parts" in reply.fault.reason for reply in asked.values())


def test_consent_of_neighbours_alone_is_too_little(tmp_path):
    """Clients far apart in the ring have no neighbour in common, so they could agree to different lists."""
    fed, link, method = federation(tmp_path, 10, Secure(threshold=0.5, neighbours=4))
    link.late["give"] = {"c09"}

    def of_neighbours(request):
        if not request.handler.endswith("_unmask"):
            return request
        session = fed.process_memory["SecAgg"]
        near = {session.agreement.names[p] for p in session.holds[session.agreement.names.index(request.client)]}
        keep = [at for at, name in enumerate(request.payload["names"]) if name in near]
        some = {"names": [request.payload["names"][at] for at in keep]}
        return request._replace(payload={**request.payload, **some, "signatures": request.payload["signatures"][keep]})

    link.change = of_neighbours
    found = refusals(fed, link, method)
    assert sum("5 signatures of the survivors arrived, 6 are needed" in reason for reason in found) == 5
    assert sum("4 signatures of the survivors arrived, 6 are needed" in reason for reason in found) == 4


# --- what the clients are shown --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [set(), {"c04"}])
def test_clients_that_are_shown_different_models_reveal_nothing(dropped, tmp_path):
    """Before anything is unmasked, and with the name."""
    fed, link, method = federation(tmp_path, 6)
    step(fed, method, 1)
    link.late["give"] = dropped
    link.change = changed("give", "c02", w=lambda w: w * 1.5)
    found = refusals(fed, link, method, 2)
    assert sum("c02 received another model than c00" in reason for reason in found) == 6 - len(dropped)
    assert not any(reply.fault is None for _, reply in link.heard if reply.call == 3 and reply.round == 2)


def test_the_masks_of_clients_that_saw_different_models_do_not_cancel(tmp_path):
    """Even if every client revealed: the pairwise masks depend on what was shown."""
    fed, link, method = federation(tmp_path, 4)
    link.change = changed("give", "c02", w=lambda w: w * 1.5)
    with pytest.raises(RunError):
        step(fed, method, 1)
    agreed = fed.process_memory["SecAgg"].agreement
    seals = {c: side.bytes_of(r.value.seal) for c, r in link.replies("give").items()}
    shown = {c: seal[:32] for c, seal in seals.items()}
    assert len(set(shown.values())) == 2
    assert shown["c00"] == shown["c01"] == shown["c03"]
    contexts = {c: agreed.context(0, bytes([1] * 4), digest) for c, digest in shown.items()}
    private, public = keys.entropy(32), keys.public_of(keys.entropy(32))
    assert len({side.pair_mask(private, public, c, ("a", "b")) for c in contexts.values()}) == 2


def test_an_argument_that_differs_by_client_is_declared(tmp_path):
    from fedfm.core.client import each

    fed, _, method = federation(tmp_path, 3)
    w = each(dict.fromkeys(names(3), fed.initial))
    fed.begin(1)
    with pytest.raises(RunError, match=r"give: \{'w'\} differ by client; declare them in @on_client"):
        fed.mean(method.give, t=1, w=w)

    def give(self, client: Client, w: Params) -> None: ...

    assert on_client(varying=("w",))(give).varying == ("w",)


@pytest.mark.parametrize("wrong", [{"c04"}, {"c00"}])
def test_clients_that_are_shown_different_cohorts_are_found(wrong, tmp_path):
    fed, link, method = federation(tmp_path, 5, Secure(threshold=0.5))
    cohort = torch.tensor([1, 1, 1, 1, 1]).byte()
    less = changed("give", **{"+told": lambda told: replace(told, cohort=named(cohort, 3, 0))})
    link.change = lambda request: less(request) if request.client in wrong else request
    step(fed, method, 1)  # the server itself sees that the seal is not of its cohort
    (found,) = [e for e in fed.excluded if e.client in wrong]
    assert "not for sum 0 and its cohort" in found.reason


def test_a_replayed_round_gets_no_second_vector_with_the_same_masks(tmp_path):
    fed, link, method = federation(tmp_path, 4)
    step(fed, method, 1)
    give = [r for r in link.sent if r.handler.endswith("_give")]
    for request in give:
        (reply,) = link.exchange([request._replace(payload={**request.payload, "t": 2})])
        assert reply.fault.reason.startswith("secure aggregation: the server requested a masked update for sum 0 again")
    share = [r for r in link.sent if r.handler.endswith("_share")]
    for request in share:
        (reply,) = link.exchange([request])
        assert "shares of seeds again" in reply.fault.reason


# --- keys and identities ---------------------------------------------------------------------------------------------


def forging(fed, link, sign, victim="c00"):
    """Replace one client's keys by the server's own."""
    own = keys.entropy(32)

    def change(request):
        if not request.handler.endswith("_share") or request.client == victim:
            return request
        session = next(r.payload["session"] for r in reversed(link.sent) if r.handler.endswith("_keys"))
        data, terms = side.OwnKeys(keys.entropy(32), 16).public(), fed.aggregator.transport._terms
        card = keys.identity_of(own) + data + sign(own, side.LABEL, "keys", terms, session, victim, data)
        rows = request.payload["published"].clone()
        rows[request.payload["names"].index(victim)] = side.to_tensor(card)
        return request._replace(payload={**request.payload, "published": rows})

    return change


def test_a_server_in_the_middle_is_found(tmp_path):
    """It replaces one client's keys by its own: unsigned; signed by itself after the first contact."""
    fed, link, method = federation(tmp_path / "a", 4)
    link.change = forging(fed, link, lambda *what: bytes(64))
    assert sum("c00 did not sign its keys for this agreement" in r for r in refusals(fed, link, method)) == 3
    fed, link, method = federation(tmp_path / "b", 4)
    step(fed, method, 1)
    fed.process_memory.clear()
    link.change = forging(fed, link, keys.sign)
    assert sum("c00 has another identity than before" in r for r in refusals(fed, link, method, 2)) == 3


def test_a_client_notices_another_identity_in_its_own_place(tmp_path):
    """The server signs c00's true keys with a key of its own, so it could sign for c00 from then on."""
    fed, link, method = federation(tmp_path, 4)
    own = keys.entropy(32)

    def signed_again(table):
        card = side.Card(side.bytes_of(table[0]))
        said = (side.LABEL, "keys", fed.aggregator.transport._terms, session(link), "c00", card.keys)
        table = table.clone()
        table[0] = side.to_tensor(keys.identity_of(own) + card.keys + keys.sign(own, *said))
        return table

    link.change = changed("share", published=signed_again)
    assert sum("shows keys for this client that are not its own" in r for r in refusals(fed, link, method)) == 1


def session(link):
    return next(r.payload["session"] for r in link.sent if r.handler.endswith("_keys"))


def rostered(n):
    """Silos with lasting keys and the roster of all."""
    private = {name: keys.entropy(32) for name in names(n)}
    roster = {name: keys.identity_of(key) for name, key in private.items()}
    return {name: {"identity": key, "roster": roster} for name, key in private.items()}


def test_a_server_in_the_middle_from_the_first_message_is_found_by_a_roster(tmp_path):
    fed, link, method = federation(tmp_path / "a", 4, own=rostered(4))
    agrees(step(fed, method, 1), names(4), 1, method)
    assert fed.notices == []
    fed, link, method = federation(tmp_path / "b", 4, own=rostered(4))
    link.change = forging(fed, link, keys.sign)
    found = refusals(fed, link, method)
    assert sum("the server shows a key of c00, " in r and "that differs from the roster's" in r for r in found) == 3


def test_a_client_that_is_not_in_the_roster_is_refused_by_name(tmp_path):
    own = rostered(4)
    for house in own.values():
        house["roster"] = {name: key for name, key in house["roster"].items() if name != "c03"}
    fed, link, method = federation(tmp_path, 4, own=own)
    assert sum("c03 is not in this silo's roster" in r for r in refusals(fed, link, method)) == 3


def test_two_names_with_one_key_are_one_silo_and_refused(tmp_path):
    own = {name: {"identity": house["identity"]} for name, house in rostered(4).items()}
    own["c02"] = own["c01"]
    fed, link, method = federation(tmp_path, 4, own=own)
    assert sum("c01 and c02 sign with the same key" in r for r in refusals(fed, link, method)) == 4


def test_without_a_roster_the_server_and_the_silos_log_name_the_fingerprints(tmp_path):
    lines = []
    own = rostered(4)
    own["c01"] |= {"roster": None, "log": lines.append}
    fed, _, method = federation(tmp_path, 4, own=own)
    step(fed, method, 1)
    prints = {name: short(keys.identity_of(house["identity"]).hex()) for name, house in own.items()}
    (notice,) = fed.notices
    assert notice.endswith(f"trust identities on first use; theirs are c01 {prints['c01']}")
    (line,) = lines
    assert line.startswith("no roster: these identities are trusted on first use: ")
    assert line.endswith(", ".join(f"{name} {prints[name]}" for name in ("c00", "c02", "c03")))


def test_replayed_keys_of_an_earlier_agreement_are_refused(tmp_path):
    fed, link, method = federation(tmp_path, 4)
    step(fed, method, 1)
    (old, *_) = [r.payload["published"] for r in link.sent if r.handler.endswith("_share")]
    fed.process_memory.clear()

    def replay(rows, client):
        rows, own = old.clone(), rows[names(4).index(client)]
        rows[names(4).index(client)] = own
        return rows

    def change(request):
        if not request.handler.endswith("_share"):
            return request
        return request._replace(
            payload={**request.payload, "published": replay(request.payload["published"], request.client)}
        )

    link.change = change
    assert sum("did not sign its keys for this agreement" in r for r in refusals(fed, link, method, 2)) == 4


def test_the_server_cannot_choose_who_is_whose_neighbour(tmp_path):
    """Positions follow from all keys. A server that tells one client of fewer members makes it another agreement."""
    n = 40
    fed, link, method = federation(tmp_path, n, Secure(neighbours=4))
    step(fed, method, 1)
    agreed = fed.process_memory["SecAgg"].agreement
    found = [agreed.around(p) for p in range(n)]
    assert all(len(near) == 4 for near in found)
    assert all(p in found[o] for p, near in enumerate(found) for o in near)
    cards = torch.stack([side.to_tensor(agreed.card(p).data) for p in range(n)])
    for at in range(3):  # any other key gives another graph
        other = cards.clone()
        other[at, 40] ^= 1
        terms, session = fed.aggregator.transport._terms, "s"
        a, b = (side.Agreed(terms, session, agreed.names, table, 4) for table in (cards, other))
        assert sum(a.around(p) == b.around(p) for p in range(n)) < 5
    fed, link, method = federation(tmp_path / "less", 6, Secure(threshold=0.5))
    less = changed("share", "c01", names=lambda every: every[:-1], published=lambda rows: rows[:-1])
    link.change = less
    step(fed, method, 1)
    assert {e.client for e in fed.excluded} == {"c01"}  # its shares have another form, and are of another agreement


def test_neighbours_are_even_over_many_agreements(tmp_path):
    """Who is next to whom: chi-square over the distance in names, 200 draws of keys of 12 members."""
    counts = np.zeros(11)
    for _ in range(200):
        table = torch.from_numpy(np.frombuffer(keys.entropy(12 * 192), np.uint8).reshape(12, 192).copy())
        agreed = side.Agreed("terms", "session", names(12), table, 2)
        for p in range(12):
            for o in agreed.around(p):
                counts[(o - p) % 12 - 1] += 1
    assert stats.chisquare(counts).pvalue > 1e-6


# --- malformed messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            changed("share", names=lambda n: n[:2], published=lambda p: p[:2]),
            "the sum has 2 clients, expected at least 3",
        ),
        (changed("share", names=lambda n: n[::-1]), "the list of members is not in order"),
        (changed("share", names=lambda n: [n[0], *n[:4]]), "the list of members is not in order"),
        (changed("share", names=lambda n: [*n[:4], "c05"]), "or lacks this client"),
        (changed("share", published=lambda p: p.roll(1, 0)), "keys for this client that are not its own"),
        (changed("keys", "c01", session="x"), "did not sign its keys for this agreement"),
        (changed("hold", present=lambda p: p[:1], sealed=lambda s: s[:1]), "shares of 1 neighbours arrived, 3 are"),
        (changed("hold", present=lambda p: p[::-1]), "shares are from clients that are not neighbours"),
        (changed("hold", sealed=lambda s: s.flip(0)), "do not fit their key and context"),
        (changed("give", **{"+told": None}), "the request lacks number and cohort of the sum"),
        (changed("give", **{"+told": lambda t: replace(t, cohort=t.cohort * 2)}), "the cohort lacks this client"),
        (changed("give", **{"+told": lambda t: replace(t, cohort=t.cohort * 0)}), "the cohort lacks this client"),
        (changed("give", **{"+told": lambda t: replace(t, number=16)}), "there are no agreed keys for this sum"),
        (changed("give", **{"+told": lambda t: replace(t, number=-1)}), "there are no agreed keys for this sum"),
        (changed("unmask", status=lambda s: s * 0 + 1), "the list of survivors is not for a sum"),
        (changed("unmask", status=lambda s: s * 2), "the list of survivors is not for a sum"),
        (changed("unmask", sum=16), "the list of survivors is not for a sum"),
        (changed("unmask", sum=1), "did not mask an update in sum 1 for this cohort"),
        (changed("unmask", seals=SEALED), "seals of 0 survivors arrived, expected 5"),
        (changed("unmask", seals=lambda s: s.flip(0)), "did not mask an update in sum 0 for this cohort"),
    ],
)
def test_messages_that_no_honest_server_sends(change, reason, tmp_path):
    fed, link, method = federation(tmp_path, 5)
    link.change = change
    assert any(reason in found for found in refusals(fed, link, method))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed("unmask", names=[], signatures=torch.empty(0, 64, dtype=torch.uint8)), "1 signatures of the"),
        (changed("unmask", signatures=lambda s: s.flip(0)), "signed another list of survivors"),
        (changed("unmask", names=lambda n: ["nobody", *n[1:]]), "nobody is not a member"),
        (changed("unmask", names=lambda n: ["c05", *n[1:]]), "c05 is not a member that survived"),
    ],
)
def test_consent_that_no_honest_server_shows(change, reason, tmp_path):
    fed, link, method = federation(tmp_path, 6)
    link.late["give"] = {"c05"}
    link.change = change
    assert any(reason in found for found in refusals(fed, link, method))


# --- lying clients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drops", [(), ("c04",), ("c03", "c04")])
def test_a_wrong_share_ends_the_round_and_names_whose_masks_stay(drops, tmp_path):
    """With more shares than needed, and with exactly as many."""
    fed, link, method = federation(tmp_path, 5, Secure(threshold=0.5))
    link.lost["unmask"] = set(drops)
    honest = link.exchange

    def lying(requests, honest=honest):
        for reply in honest(requests):
            if requests[0].handler.endswith("_unmask") and reply.client == "c00":
                reply = reply._replace(value=reply.value ^ 1)
            yield reply

    link.exchange = lying
    with pytest.raises(RunError, match=r"the masks of c0. stay in the sum: a share is wrong"):
        step(fed, method, 1)


def test_a_client_that_signs_for_another_is_left_out(tmp_path):
    """c01 sends the seal of c02: the server checks each with the identity of its sender."""
    fed, link, method = federation(tmp_path, 5)
    honest = link.exchange

    def lying(requests, honest=honest):
        replies = list(honest(requests))
        if requests[0].handler.endswith("_give"):
            of = {reply.client: reply.value for reply in replies}
            other = replace(of["c01"], seal=of["c02"].seal)
            replies = [r._replace(value=other) if r.client == "c01" else r for r in replies]
        yield from replies

    link.exchange = lying
    agrees(step(fed, method, 1), [c for c in names(5) if c != "c01"], 1, method)
    assert [(e.client, e.code) for e in fed.excluded] == [("c01", "E_FIELD")]
