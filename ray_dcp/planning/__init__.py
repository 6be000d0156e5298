"""Plans: what of a rank's state is stored or filled, under which names, and whether all ranks agree. No I/O, no Ray.

``values`` holds what a rank hands over, ``save_plan`` decides who writes what of it, ``template`` what a load fills.
``local_shards`` and ``per_rank`` are the kinds of value that DCP has no word for.
"""
