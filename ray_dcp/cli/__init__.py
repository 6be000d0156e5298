"""``ray-dcp``, one file a command. Starts without Ray and without torch; ``main`` lists the commands."""
