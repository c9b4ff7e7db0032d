"""A daemon killed at any moment under load keeps what it acknowledged, and does not disturb agents."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx
import numpy as np
import pytest

from kvxfer import AgentOptions, LeaseToken, RegionDescriptor
from kvxfer.testing.pair import Pair, connected_pair
from tests.control.serving import BOUND_S, program
from tests.control.test_daemon_faults import Traffic
from tests.waiting import until

T = TypeVar("T")
ARGUMENTS = ("--pool-gib", str(1 / 64))
MAY = ("show", "drain", "move", "grant")
MODEL = {"model": "m"}
NAMES = [f"page-{number}" for number in range(40)]
NEVER = "never-parked"
#: Blocks of each cache: `Traffic` writes 1 to 2; what REST moves goes from 3 to 0; the rest is for pages.
MOVED, INTO = 3, 0
PAGES = range(4, 16)
#: Of leases and transfers: those that the daemon began end soon after it.
TTL_S = 5.0
_MOST_TOKENS = 24
_REPLAYED = 6


@dataclass
class Kept(Generic[T]):
    """The expected answer of the daemon: after a change without an acknowledgement, one of two values."""

    value: T
    asked: T | None = None

    def change(self, value: T, send: Callable[[], bool]) -> None:
        """Changes it by `send`, which returns whether it was acknowledged; after an error that is unknown."""
        self.asked = value
        if send():
            self.value = value
        self.asked = None

    def see(self, found: T) -> None:
        """Takes the value that the daemon answered."""
        assert found == self.value or (self.asked is not None and found == self.asked), (found, self)
        self.value, self.asked = found, None


@dataclass
class Token:
    """A token that was made."""

    id: str
    secret: str
    valid: Kept[bool] = field(default_factory=lambda: Kept(True))


@dataclass
class Post:
    """A request with an idempotency key, and its answer."""

    path: str
    body: dict[str, Any]
    key: str
    answer: tuple[int, bytes] | None = None


class Load:
    """The requests to a daemon until it is killed, and what it has acknowledged by then.

    `park`, `administer` and `move` are each for one thread; what is said of them here is read in between.
    """

    def __init__(self, pair: Pair, socket: Path, draw: random.Random) -> None:
        self.pair = pair
        self.draw = draw
        self._socket = socket
        self.layout = ""
        #: Of this run: the block under each key, which keys are acknowledged, and which may be.
        self.blocks: dict[str, int] = {}
        self.attempted: set[str] = set()
        self.tokens: dict[str, Token] = {}
        self.unmade: set[str] = set()
        self.revoked: list[Token] = []
        self.quota = Kept(1)
        self.drain = Kept(False)
        self.posts: list[Post] = []
        self.last_index = 0
        self.counts = dict.fromkeys(
            ("parked", "read", "made", "revoked", "moved", "unanswered", "drained"), 0
        )

    def has_seen_all(self) -> bool:
        """Returns whether each kind of request was acknowledged, and one was left unanswered."""
        return all(count for what, count in self.counts.items() if what != "drained")

    def client(self, secret: str = "") -> httpx.Client:
        """Returns a client over the unix socket: as an admin, or with the token."""
        transport = httpx.HTTPTransport(uds=str(self._socket), verify=False)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        return httpx.Client(base_url="http://node", transport=transport, timeout=BOUND_S, headers=headers)

    # ---- requests ----------------------------------------------------------------------------------

    def post(self, client: httpx.Client, draw: random.Random, path: str, body: dict[str, Any]) -> Any:
        """Returns the answer, or None if it was refused, as a draining node does."""
        sent = Post(path, body, f"{draw.getrandbits(64):x}")
        self.posts.append(sent)
        answer = send(client, sent)
        if answer.is_success:
            sent.answer = answer.status_code, answer.content
            return answer.json()
        self.posts.remove(sent)
        refused(answer, "draining")
        return None

    def park(self, client: httpx.Client, draw: random.Random) -> None:
        keys = draw.sample(NAMES, draw.randint(1, 4))
        which = {**MODEL, "keys": keys, "layout": self.layout}
        match draw.random() if self.layout else 0:
            case chance if chance < 0.75:
                blocks = draw.choices(PAGES, k=len(keys))
                asked = {"agent": "prefill", "region": "kv", "blocks": blocks, "timeout_s": TTL_S}
                self.attempted.update(keys)
                answer = self.post(client, draw, "/v1/pages/park", {**MODEL, **asked, "keys": keys})
                if answer is not None:
                    self.take_parked(blocks, answer)
            case chance if chance < 0.9:
                leased = client.post("/v1/pages/lease", json={**which, "ttl_s": 1.0})
                if leased.is_success:
                    found = {key for part in leased.json()["parts"] for key in part["keys"]}
                    assert found == {key for key in keys if key in self.blocks}
                else:
                    refused(leased, "draining")
            case _:
                for key in keys:
                    self.blocks.pop(key, None)
                assert client.post("/v1/pages/drop", json=which).is_success

    def take_parked(self, blocks: list[int], answer: dict[str, Any]) -> None:
        """Notes that pages of these blocks were acknowledged."""
        self.layout = answer["layout"]
        for block, page in zip(blocks, answer["pages"], strict=True):
            assert page["state"] == ("present" if page["key"] in self.blocks else "parked")
            self.blocks.setdefault(page["key"], block)
            self.counts["parked"] += 1

    def administer(self, client: httpx.Client, draw: random.Random) -> None:
        valid = [name for name, token in self.tokens.items() if token.valid.value]
        if self.drain.value and draw.random() < 0.5:
            self.set_drain(client, False)
        match draw.random():
            case chance if chance < 0.45 and len(valid) < _MOST_TOKENS:
                name = f"token {draw.getrandbits(64):x}"
                self.unmade.add(name)
                made = self.post(client, draw, "/v1/tokens", {"name": name})
                self.unmade.discard(name)
                self.tokens[name] = Token(made["id"], made["secret"])
                self.counts["made"] += 1
            case chance if chance < 0.75 and valid:
                self.revoke(client, draw.choice(valid))
            case chance if chance < 0.9:
                quota = draw.randint(1, 1 << 40)
                asked = {"page_quotas_nbytes": {"nobody": quota}}
                self.quota.change(quota, lambda: client.patch("/v1/settings", json=asked).is_success)
            case chance if chance < 0.93:
                self.set_drain(client, True)
            case _:
                self.look_at_events(client)

    def revoke(self, client: httpx.Client, name: str) -> None:
        token = self.tokens[name]
        token.valid.change(False, lambda: client.delete(f"/v1/tokens/{token.id}").is_success)
        assert not token.valid.value
        self.revoked.append(self.tokens.pop(name))
        self.counts["revoked"] += 1

    def set_drain(self, client: httpx.Client, on: bool) -> None:
        def ask() -> bool:
            answer = client.put("/v1/drain", json={}) if on else client.delete("/v1/drain")
            assert answer.json()["draining"] is on
            return answer.is_success

        self.drain.change(on, ask)
        self.counts["drained"] += on

    def look_at_events(self, client: httpx.Client, after: int | None = None) -> None:
        """Checks that indexes only grow, across restarts too; `after` is for those of a new run."""
        since = self.last_index if after is None else after
        answer = client.get("/v1/events/recent", params={"after": since, "limit": 250}).json()
        for event in answer["items"]:
            assert event["index"] > self.last_index
            self.last_index = event["index"]

    def move(self, client: httpx.Client, draw: random.Random) -> None:
        asked = {"agent": "decode", "region": "kv", "blocks": [MOVED], "ttl_s": TTL_S}
        lease = self.post(client, draw, "/v1/leases", asked)
        if lease is None:
            return
        ends = {"agent": "prefill", "region": "kv", "remote_agent": "decode", "remote_region": "kv"}
        asked = {**ends, "src_blocks": [MOVED], "dst_blocks": [INTO], "timeout_s": TTL_S}
        made = self.post(client, draw, "/v1/transfers", {**asked, "lease": lease["token"]})
        if made is not None and draw.random() < 0.5:
            ended = client.get(f"/v1/transfers/{made['id']}", params={"wait_s": 30}).json()
            assert ended["state"] == "done", ended
            self.counts["moved"] += 1
        if draw.random() < 0.5:
            client.delete(f"/v1/leases/{lease['id']}")

    def until_killed(self, step: Callable[[httpx.Client, random.Random], None], seed: int) -> None:
        """Repeats a step until the daemon no longer answers."""
        draw = random.Random(seed)
        with self.client() as client:
            try:
                while True:
                    step(client, draw)
            except httpx.TimeoutException:
                raise
            except httpx.TransportError:
                pass

    # ---- after a restart -----------------------------------------------------------------------------

    def check(self, client: httpx.Client) -> None:
        """Checks that a new run keeps what the last one acknowledged."""
        assert client.get("/healthz").status_code == 200
        self._check_node(client)
        self._check_tokens(client)
        self._check_pages(client)
        self._check_posts(client)
        self.look_at_events(client, after=0)
        self._check_new_pages(client)

    def _check_node(self, client: httpx.Client) -> None:
        quotas = client.get("/v1/settings").json()["page_quotas_nbytes"]
        self.quota.see(quotas.get("nobody", 1))
        self.drain.see(client.get("/v1/drain").json()["draining"])
        until(lambda: regions(client) >= {"prefill", "decode"}, "the agents are not attached")
        assert client.get("/readyz").status_code == (503 if self.drain.value else 200)
        # Agents learn what they missed.
        agents = (self.pair.prefill.agent, self.pair.decode.agent)
        until(
            lambda: all((agent.draining is not None) is self.drain.value for agent in agents),
            f"agents, and the node that drains: {self.drain.value}",
        )
        self.set_drain(client, False)
        assert all(agent.draining is None for agent in agents)

    def _check_tokens(self, client: httpx.Client) -> None:
        listed = {item["name"]: item["id"] for item in client.get("/v1/tokens?limit=250").json()["items"]}
        assert len(listed) < 250
        for name, token in list(self.tokens.items()):
            token.valid.see(name in listed)
            if not token.valid.value:
                self.revoked.append(self.tokens.pop(name))
        for name in listed.keys() - self.tokens.keys() - {"admin"}:
            assert name in self.unmade, "nobody made it, or it is revoked"
            assert client.delete(f"/v1/tokens/{listed[name]}").is_success
        for token in self.tokens.values():
            assert self._whoami(token) == 200
        for token in self.revoked[-_REPLAYED:]:
            assert self._whoami(token) == 401

    def _whoami(self, token: Token) -> int:
        with self.client(token.secret) as client:
            return client.get("/v1/whoami").status_code

    def _check_pages(self, client: httpx.Client) -> None:
        if self.layout:
            asked = {**MODEL, "keys": [*NAMES, NEVER], "layout": self.layout}
            found = client.post("/v1/pages/lease", json=asked).json()
            assert found["parts"] == []
            for page in found["missing"]:
                if page["key"] in self.blocks:
                    assert page["state"] == "gone", page
                elif page["key"] not in self.attempted:
                    assert page["state"] == "missing", page
        self.blocks.clear()
        self.attempted.clear()

    def _check_posts(self, client: httpx.Client) -> None:
        """The same key gives the same answer; where none came, either that it is not known, or one."""
        answered = [post for post in self.posts if post.answer is not None]
        unanswered = [post for post in self.posts if post.answer is None]
        self.counts["unanswered"] += len(unanswered)
        for post in self.draw.sample(answered, min(_REPLAYED, len(answered))):
            again = send(client, post)
            if post.path == "/v1/tokens":
                refused(again, "conflict")  # its secret is shown once
            else:
                assert again.headers["idempotent-replay"] == "true"
                assert (again.status_code, again.content) == post.answer
        for post in unanswered:
            again = send(client, post)
            if again.is_success and "idempotent-replay" not in again.headers:
                self._take_late(client, post, again.json())
            elif not again.is_success:
                # What a late transfer needs may have ended.
                refused(again, "conflict", *(["lease-ended"] if post.path == "/v1/transfers" else []))
        del self.posts[:]
        self.posts += answered[-50:]

    def _take_late(self, client: httpx.Client, post: Post, answer: dict[str, Any]) -> None:
        """Takes what has been carried out only now."""
        if post.path == "/v1/pages/park":
            self.attempted.update(post.body["keys"])
            self.take_parked(post.body["blocks"], answer)
        elif post.path == "/v1/tokens":
            assert client.delete(f"/v1/tokens/{answer['id']}").is_success

    def _check_new_pages(self, client: httpx.Client) -> None:
        """Checks that pages parked now are fetched byte for byte."""
        keys = self.draw.sample(NAMES, 4)
        self.attempted.update(keys)
        blocks = self.draw.sample(PAGES, 4)
        asked = {"agent": "prefill", "region": "kv", "blocks": blocks, "timeout_s": TTL_S}
        answer = self.post(client, self.draw, "/v1/pages/park", {**MODEL, **asked, "keys": keys})
        self.take_parked(blocks, answer)
        which = {**MODEL, "keys": keys, "layout": self.layout}
        leased = client.post("/v1/pages/lease", json={**which, "ttl_s": BOUND_S}).json()
        assert leased["missing"] == []
        reader = self.pair.decode
        for part in leased["parts"]:
            remote = RegionDescriptor.from_bytes(json.dumps(part["region"]).encode())
            reader.agent.connect_blocking(remote, BOUND_S)
            into = self.draw.sample(PAGES, len(part["blocks"]))
            token = LeaseToken.parse(part["token"])
            reader.agent.read(reader.region, remote, part["blocks"], into, lease=token).wait(BOUND_S)
            parked = [self.blocks[key] for key in part["keys"]]
            assert (reader.blocks(into) == self.pair.prefill.blocks(parked)).all()
            self.counts["read"] += len(parked)
        if self.draw.random() < 0.5:
            assert client.delete(f"/v1/pages/lease/{leased['id']}").is_success


def send(client: httpx.Client, post: Post) -> httpx.Response:
    return client.post(post.path, json=post.body, headers={"Idempotency-Key": post.key})


def refused(answer: httpx.Response, *codes: str) -> None:
    assert not answer.is_success
    assert answer.json()["code"] in codes, answer.text


def regions(client: httpx.Client) -> set[str]:
    return {item["agent_name"] for item in client.get("/v1/regions").json()["items"]}


def num_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Any:
    """Two agents that reconnect to the daemon quickly, and may write to each other."""
    monkeypatch.setattr("kvxfer.daemon_link.link._LONGEST_RETRY_S", 0.2)
    # Neither loses the other if one of them gets no processor time for seconds.
    options = AgentOptions(daemon=str(tmp_path / "run"), daemon_may=MAY, silent_timeout_s=BOUND_S)
    with connected_pair(options) as made:
        random_bytes = np.random.default_rng(seed)
        for cache in (made.prefill, made.decode):
            cache.array[:] = random_bytes.integers(0, 1 << 16, cache.array.shape, np.uint16)
        made.decode.region.grant(made.decode.peer, mode="write", ttl_s=7200).wait(BOUND_S)
        yield made


ROUNDS = [
    pytest.param(5, marks=pytest.mark.timeout(900)),  # under load a round takes ten seconds, otherwise two
    pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_what_was_acknowledged_outlives_kills_under_load(
    rounds: int, tmp_path: Path, pair: Pair, seed: int
) -> None:
    draw = random.Random(seed)
    load = Load(pair, tmp_path / "run/api.sock", draw)
    agents = (pair.prefill.agent, pair.decode.agent)
    traffic = Traffic(pair)
    most_fds = 0
    try:
        for number in itertools.count():
            # What a slow machine has not done by then takes more rounds.
            if number >= rounds and load.has_seen_all():
                break
            assert number < 10 * rounds, load.counts
            with (
                ThreadPoolExecutor(3) as threads,
                program(tmp_path, *ARGUMENTS, agent=True) as daemon,
                load.client() as client,
            ):
                load.check(client)
                steps = (load.park, load.administer, load.move)
                running = [threads.submit(load.until_killed, step, draw.getrandbits(32)) for step in steps]
                time.sleep(draw.uniform(0, 0.4))  # the moment of the fault
                daemon.process.kill()
                daemon.process.wait(BOUND_S)
            for each in running:
                each.result()
            traffic.goes_on()
            if number == 0:
                most_fds = quiet_fds(agents)
        with program(tmp_path, *ARGUMENTS, agent=True) as daemon, load.client() as client:
            load.check(client)
            assert traffic.stop()
            until(lambda: rests(client), "what a daemon that is dead began has not ended")
            assert daemon.end() == 0
        until(lambda: quiet_fds(agents) <= most_fds, f"descriptors leak: {num_fds()}, not {most_fds}")
    finally:
        traffic._stopped.set()
    assert (pair.decode.blocks([2]) == pair.prefill.blocks([1])).all()


def quiet_fds(agents: Collection[Any]) -> int:
    """Waits until the agents have no other peers, and returns the number of descriptors."""
    until(lambda: all(len(agent.peers) == 1 for agent in agents), "they know a daemon that is dead")
    return num_fds()


def rests(client: httpx.Client) -> bool:
    """Whether neither agent of the pair has an open transfer, or a lease other than the pair's own."""
    leases = client.get("/v1/leases").json()["items"]
    open_ = client.get("/v1/open-transfers").json()["items"]
    granted = [lease["mode"] for lease in leases if lease["agent_name"] in ("prefill", "decode")]
    return not open_ and granted == ["write"]


def test_an_agent_that_missed_the_end_of_a_drain_hears_of_it(tmp_path: Path, pair: Pair) -> None:
    """A daemon is killed after it stored the end of a drain, and before it told the agents."""
    load = Load(pair, tmp_path / "run/api.sock", random.Random(0))
    with program(tmp_path) as daemon, load.client() as client:
        until(lambda: regions(client) == {"prefill", "decode"}, "the agents are not attached")
        load.set_drain(client, True)
        assert pair.prefill.agent.draining is not None
        daemon.process.kill()
    # In the next daemon's state the drain has ended.
    (tmp_path / "state").rename(tmp_path / "before")
    with program(tmp_path):
        until(lambda: pair.prefill.agent.draining is None, "it drains for ever")
        until(lambda: pair.decode.agent.draining is None, "it drains for ever")
