"""Charts as plain values, drawn on pages and in pictures alike."""

from megatron_hdp.simulator.charts.chart import COLOURS, Chart, colour_of
from megatron_hdp.simulator.charts.drawing import chart_places, draw, on_page, save

__all__ = ["COLOURS", "Chart", "chart_places", "colour_of", "draw", "on_page", "save"]
