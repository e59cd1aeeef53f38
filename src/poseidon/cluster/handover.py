"""What ranks and the launcher that starts them again tell each other beside the network: exit code and small files.

The files are in the folder in memory that the launcher makes for each host and names in POSEIDON_MEMORY.
"""

MEMORY_VARIABLE = "POSEIDON_MEMORY"
LEAVING_CODE = 75
"""Exit code of every rank once all have agreed that one of them leaves: the job goes on without it."""
PROGRESS_FILE = "progress"
"""The last step that the first rank of a host has finished, in digits."""
LEAVING_FILE = "leaving-"
"""And then the number of a rank: it was asked to leave, and nothing of it is needed any more."""
