"""Node agents: the actor that writes what ranks of its node have staged (``agent_actor``), and a rank's way to it.

What an agent does is ``protocol.node_agent``; here is how it is started, found and asked. The actor's side starts
without torch.
"""
