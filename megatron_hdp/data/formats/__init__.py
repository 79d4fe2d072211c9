import os


def kind_of(spec):
    if spec.format != "auto":
        return spec.format
    return "tokens"
