"""Has agents connect to others: by a permitted address, or by the name of an attached agent."""

from __future__ import annotations

from typing import Any, Final

from kvxfer.allowed_hosts import AllowedHosts
from kvxfer.control import schema
from kvxfer.control.agents.agent_messages import peer_of
from kvxfer.control.agents.agent_view import AgentView
from kvxfer.control.agents.attached import Attached
from kvxfer.control.agents.dial_check import require_allowed
from kvxfer.control.agents.drains import Drains
from kvxfer.control.schema.problems import Refusal
from kvxfer.daemon_link.frames import Malformed

# For an agent's answer; its own `connect_timeout_s` is usually shorter.
_CONNECT_TIMEOUT_S: Final = 15.0


class AgentDials:
    """Finds the address by which one agent reaches another, and has it connect."""

    def __init__(self, agents: AgentView, drains: Drains, allowed: AllowedHosts) -> None:
        self._agents = agents
        self._drains = drains
        self._allowed = allowed

    def arguments_of(self, remote: str, agent: Attached) -> dict[str, Any]:
        """Returns the arguments by which `agent` finds another agent.

        An attached agent is named by its incarnation or its address. For any other the agent itself asks its
        directory and its name servers, so it gets the permitted hosts, and checks what it dials.

        Raises
        ------
        Refusal
            ``forbidden``: the address is not permitted.
        """
        require_allowed(self._allowed, remote)
        found = self._agents.some(remote)
        if len(found) != 1 or not found[0].address:
            return {"remote_agent": remote, "allow": list(self._allowed.hosts)}
        known = any(peer["incarnation"] == found[0].incarnation for peer in agent.peers)
        return {"remote_agent": found[0].incarnation if known else found[0].address}

    async def connect(self, name: str, asked: schema.ConnectRequest) -> schema.Peer:
        """Has an agent connect to another; returns the new session, or the newest of those that are open."""
        self._drains.require_open()
        agent = self._agents.find(name)
        args = self.arguments_of(asked.remote_agent, agent)
        told = await self._agents.call(agent, "move.connect", args, _CONNECT_TIMEOUT_S)
        try:
            row = peer_of(told)
        except Malformed as error:
            raise Refusal(
                "protocol", f"agent {agent.name!r} answered without a valid session: {error}"
            ) from None
        return self._agents.peer(agent, row)
