def prepare(*a, **k):
    raise NotImplementedError
