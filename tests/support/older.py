"""What releases before mixtures kept in checkpoints."""


def order_before_mixtures(record):
    """The record of an order with one source, as those releases saved it: no version is named."""
    record = dict(record)
    (source,) = record.pop("sources").values()
    own = {key: value for key, value in source.items() if key not in ("version", "key")}
    for name in ("absent", "weight_unit"):
        del record[name]
    return record | own
