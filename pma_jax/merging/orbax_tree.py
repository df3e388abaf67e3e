"""Reading Orbax checkpoints."""


def is_orbax(path):
    return False
