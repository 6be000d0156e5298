"""Memory of other nodes: what an agent's peers hold (``peer``), what it keeps for them (``peer_copies``), and what it
has them keep (``peer_offers``). Without torch and Ray.
"""
