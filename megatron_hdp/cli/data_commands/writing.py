"""Charts as a picture or as a page, by the file's name."""

from collections.abc import Sequence

from megatron_hdp.simulator.charts import Chart, chart_places, draw, on_page, save
from megatron_hdp.simulator.filling import script_data, text_of, write_filled
from megatron_hdp.simulator.plot import import_figure


def write_charts(path: str, title: str, charts: Sequence[Chart], text: str) -> None:
    """Write charts to a file; a page holds the text, too.

    Raises:
        ImportError: a picture is wanted, and matplotlib is not installed.
    """
    if path.endswith(".html"):
        _write_page(path, title, charts, text)
    else:
        _write_picture(path, title, charts)


def _write_page(path: str, title: str, charts: Sequence[Chart], text: str) -> None:
    document = {"title": title, "text": text, "charts": [on_page(one) for one in charts]}
    template = text_of("megatron_hdp.cli.data_commands", "page.html")
    write_filled(path, template, {**chart_places(), "__CHARTS__": script_data(document)})


def _write_picture(path: str, title: str, charts: Sequence[Chart]) -> None:
    figure_class = import_figure("a picture", ", or write a page (.html)")
    figure = figure_class(figsize=(11.0, 3.6 * len(charts)), dpi=130, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for chart, axes in zip(charts, figure.subplots(len(charts), squeeze=False)[:, 0], strict=True):
        draw(axes, chart)
    save(figure, path)
