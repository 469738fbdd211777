"""The parts every page is built from: header controls, chart cards with their states, banners. Streamlit lives here."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import urlencode
from zoneinfo import ZoneInfo, available_timezones

import pandas as pd
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from exporters.adapters.capability import Capability
from observability.app import absence, charts, files, queries, settings
from observability.app.findings import Finding
from observability.app.marks import Mark
from observability.app.queries import Freshness
from observability.app.reads import StoppedError
from observability.app.units import setting
from observability.app.view import DEFAULT_RANGE, RANGES, VERSUS, View, make_view, moment
from observability.errors import KvscopeError
from observability.signals import Signal
from observability.store.source import SeriesSource

log = logging.getLogger(__name__)

_MARK = '<path d="M2 20V4h4v16zM8 20v-7h4v7zM14 20V9h4v11z" fill="#2f7fc1"/><path d="M20 20V2h2v18z" fill="#d1493f"/>'
LOGO = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">{_MARK}</svg>'
LOGO_WITH_NAME = (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="112" height="24" viewBox="0 0 112 24">{_MARK}<text x="30" y="18.5" fill="#7d8794" '
    'font-family="system-ui,-apple-system,Segoe UI,Roboto,Noto Sans,Liberation Sans,sans-serif" font-size="18" '
    'font-weight="600">kvscope</text></svg>'
)
_chart, _menus = (
    st.components.v2.component(
        f"kvscope_{name}", js=Path(__file__).with_name(f"{name}.js").read_text(), isolate_styles=False
    )
    for name in ("chart", "menu")
)
_MENU = "Query, data, picture"
_PAGE_NAMES = {
    "quantization": "what quantization costs",
    "batching": "how batches are made",
    "kv-cache": "the KV cache",
    "p99": "the make-up over time",
    "forecast": "the next hour",
}
#: From this share of the view on, a missing signal is explained by virtual time.
_MOSTLY_SIMULATED = 0.5


@dataclass(frozen=True, slots=True)
class Context:
    """What a page draws from: the source, the view, the spans of the view that come from virtual time, what is marked in time
    charts, and what the view is compared with (a key of VERSUS, or nothing)."""

    source: SeriesSource
    view: View
    simulated: Sequence[tuple[float, float]] = ()
    marks: Sequence[Mark] = ()
    versus: str = ""
    #: What the engine cannot feed, by view: read once for all cards.
    told: dict[View, absence.Told] = field(default_factory=dict, compare=False, repr=False)
    #: What the menu says of each card that was drawn, by its key.
    cards: dict[str, Card] = field(default_factory=dict, compare=False, repr=False)

    @property
    def earlier(self) -> View | None:
        """The view that this one is compared with."""
        return self.view.days_before(VERSUS[self.versus]) if self.versus else None

    @property
    def apart(self) -> pd.Timedelta:
        """How far the view that this one is compared with lies before it."""
        assert self.earlier is not None
        return pd.Timedelta(seconds=self.view.start - self.earlier.start)

    def frame(
        self, height: int, lines: Sequence[charts.Line] = (), earlier: charts.Earlier | None = None
    ) -> charts.Frame:
        """What surrounds a time chart of `height` px."""
        return charts.Frame(self.view, self.simulated, lines, height, self.marks, earlier)


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart card: the question that it answers, what it reads and how it is drawn.

    `read` may return no rows: the card then says why, by the signals it stands on. Where the reader compares with another day, a panel
    that is `compared` is read again for that day.
    """

    key: str
    question: str
    unit: str
    signals: tuple[Signal, ...]
    read: Callable[[SeriesSource, View], pd.DataFrame]
    draw: Callable[[pd.DataFrame, charts.Frame], charts.Drawing]
    lines: Sequence[charts.Line] = ()
    note: str = ""
    words: Callable[[Context, pd.DataFrame], str] | None = None  # HTML over the chart: the figure of now, in words
    compared: bool = False  # `draw` shows the earlier rows of the frame (lines and stacked do)


# -- header ---------------------------------------------------------------------------------------------------------


def style() -> None:
    """Adds the style sheet and the scripts that load Plotly and save pictures; they take no place on the page."""
    folder = Path(__file__).parent
    st.html(folder / "style.css")
    with st.container(key="script"):
        for name in ("load_plotly.js", "save_picture.js"):
            script = (folder / name).read_text().replace("PLOTLY", settings.PLOTLY.name)
            st.html(f"<script>{script}</script>", unsafe_allow_javascript=True)


@dataclass(frozen=True, slots=True)
class Selection:
    """What the reader chose: model, range in seconds, end (None: follow the present), time zone, what to compare with (a key
    of VERSUS, or nothing)."""

    model: str | None
    seconds: int
    end: float | None
    zone: str
    versus: str = ""

    def view(self, now: float) -> View:
        return make_view(self.model or "", self.seconds, self.end or now, self.zone)


_known_zones = functools.cache(available_timezones)  # it looks through folders


def _zones() -> list[str]:
    """Time zones to choose from: UTC, that of the browser, that of the link. They have their names, so that a link shows others the same hours."""
    wanted = ("UTC", st.context.timezone, st.query_params.get("tz"))
    return list(dict.fromkeys(zone for zone in wanted if zone in _known_zones()))


def _keep_end() -> None:
    """In another time zone the end of the range is the same moment."""
    end, before = st.session_state.get("end"), ZoneInfo(st.session_state.get("zone", "UTC"))
    if end is not None:
        now = ZoneInfo(st.session_state["tz"] or "UTC")
        st.session_state["end"] = end.replace(tzinfo=before).astimezone(now).replace(tzinfo=None)


def controls(models: Sequence[str]) -> Selection:
    """The row of filters under the header; every choice is in the URL and holds on every page."""
    with st.container(key="controls", horizontal=True, vertical_alignment="center", gap="small"):
        chosen = st.segmented_control(
            "Time range", list(RANGES), default=DEFAULT_RANGE, key="range", bind="query-params", required=True,
            label_visibility="collapsed",
        )  # fmt: skip
        st.html('<span class="until">until</span>', width="content")
        end = st.datetime_input(
            "End of the range", value=None, key="end", bind="query-params", step=60, label_visibility="collapsed",
            width=190,
        )  # fmt: skip
        st.html(f'<span class="until">{"(empty: now)" if end is None else ""}</span>', width="content")
        versus = st.selectbox(
            "Compare with", list(VERSUS), index=None, key="vs", bind="query-params", label_visibility="collapsed", width=170,
            placeholder="compare with …",
        )  # fmt: skip
        st.space("stretch")
        zone = st.segmented_control(
            "Time zone", _zones(), default="UTC", key="tz", bind="query-params", required=True, on_change=_keep_end,
            label_visibility="collapsed",
        ) or "UTC"  # fmt: skip
        model = st.selectbox(
            "Model", list(models) or ["no model yet"], key="model", bind="query-params", label_visibility="collapsed",
            width=230,
        )  # fmt: skip
    st.session_state["zone"] = zone
    unix = None if end is None else end.replace(tzinfo=ZoneInfo(zone)).timestamp()
    return Selection(model if models else None, RANGES[chosen or DEFAULT_RANGE], unix, zone, versus or "")


def stop_buttons() -> None:
    """Buttons that the style sheet shows while a read takes long, and after it was stopped. They stand outside of what is read:
    so they can be pressed while it is."""
    with st.container(key="stop"):
        st.button("Stop", key="stop-reading", on_click=lambda: st.session_state.update(stopped=True))
        st.button("Read again", key="read-again", on_click=lambda: st.session_state.update(stopped=False))


def status_place() -> DeltaGenerator:
    """The place at the right of the header where `status` writes; until then it says what it last said."""
    place = st.container(key="status").empty()
    if "status" in st.session_state:
        place.html(st.session_state["status"])
    return place


def status(place: DeltaGenerator, kind: str, text: str, simulated: bool = False) -> None:
    """The pill in the header: `kind` is live, stale, down, reading or stopped. Shape and words tell it, not only colour."""
    virtual = '<span class="pill virtual">Simulated</span>' if simulated else ""
    html = f'{virtual}<span class="pill {kind}" role="status"><i></i>{escape(text)}</span>'
    st.session_state["status"] = html
    place.html(html)


def freshness_status(place: DeltaGenerator, fresh: Freshness, zone: str, simulated: bool) -> None:
    """`status` of a source that answers."""
    if fresh.state == "empty":
        status(place, "stale", "No data yet")
    elif fresh.state == "stale":
        status(place, "stale", f"Stale since {moment(fresh.newest or 0, zone):%H:%M:%S}", simulated)
    else:
        status(place, "live", f"Live · {max(1, round(fresh.age or 0))} s old", simulated)


# -- states -----------------------------------------------------------------------------------------------------------


def banner(kind: str, title: str, text: str, commands: Sequence[str] = ()) -> None:
    """A wide note: `kind` is error, warning or info. Commands are shown to be copied."""
    code = "".join(f"<code>{escape(command)}</code>" for command in commands)
    st.html(
        f'<div class="banner {kind}" role="{"alert" if kind == "error" else "status"}"><b>{escape(title)}</b>'
        f"<span>{with_code(text)}</span>{code}</div>"
    )


def with_code(text: str) -> str:
    """`text` as HTML, what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def source_error(error: KvscopeError, every: int) -> None:
    """The banner for a source that cannot be read at all; the page tries again `every` so many seconds."""
    text = f"{error.next_step} " if error.next_step else ""
    if isinstance(error, StoppedError):
        banner("info", error.reason, f"What was read before is shown. {text}")
        return
    banner("error", error.reason, f"{text}The page tries again every {every} s; no reload is needed.")


def empty_source(description: str) -> None:
    """What to do when the source has never been written to."""
    banner(
        "info", "Nothing has been recorded yet.",
        f"{description} holds no values. Record a running engine, or simulate some days of history:",
        ("kvscope record --url http://127.0.0.1:8000/metrics", "kvscope history"),
    )  # fmt: skip


def stale_source(fresh: Freshness, zone: str) -> None:
    """Since when nothing new has come."""
    since = f"{moment(fresh.newest or 0, zone):%-d %b %H:%M:%S}"
    banner(
        "warning", f"Nothing new since {since} ({setting(round(fresh.age or 0), 'seconds')} ago).",
        "The engine, its exporter or the recorder stopped. What is shown ends there; it goes on by itself when data returns.",
    )  # fmt: skip


# -- cards --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Content:
    """What a card shows: words (HTML) over and below a figure, or the reason why there is nothing; `data` is offered as a file."""

    html: str = ""
    figure: charts.Drawing | None = None
    below: str = ""
    absent: str = ""
    data: pd.DataFrame | None = None
    more: tuple[str, str] = ("", "")  # title and Markdown of what is folded away under it


@dataclass(frozen=True, slots=True)
class Card:
    """What the menu of a card says: how to read it, what it stands on, what it shows."""

    note: str
    signals: Sequence[Signal]
    content: Content


def card(context: Context, panel: Panel, height: int = 200) -> None:
    """A chart card of `height` px of chart."""

    def build() -> Content:
        data = panel.read(context.source, context.view)
        if data.empty:
            return Content(absent=why_absent(context, panel.signals))
        earlier = _earlier(context, panel)
        figure = panel.draw(data, context.frame(height, panel.lines, earlier))
        words = panel.words(context, data) if panel.words else ""
        if earlier is not None:
            then = earlier.data.assign(time=earlier.data["time"] - context.apart, day=earlier.when)
            data = pd.concat([data.assign(day="shown"), then], ignore_index=True)
        return Content(words, figure, data=data)

    _card(context, panel.key, panel.question, panel.unit, panel.note, panel.signals, build, height)


def _earlier(context: Context, panel: Panel) -> charts.Earlier | None:
    """What `panel` showed on the day to compare with, on the times of the view."""
    if context.earlier is None or not panel.compared:
        return None
    data = panel.read(context.source, context.earlier)
    return charts.Earlier(data.assign(time=data["time"] + context.apart), context.versus)


def text_card(
    context: Context, key: str, question: str, unit: str, signals: Sequence[Signal], write: Callable[[Context], Content],
    *, note: str = "", height: int = 190,
) -> None:  # fmt: skip
    """A card of words (or a figure of its own) that `write` makes."""
    _card(context, key, question, unit, note, signals, lambda: write(context), height)


def why_absent(context: Context, signals: Sequence[Signal]) -> str:
    """Why the source has no row of `signals` in the view."""
    since = queries.last_seen(context.source, context.view, signals)
    if since is not None and not queries.is_current(since, context.view):
        return f"Nothing since {moment(since, context.view.zone):%-d %b %H:%M}: what it was then is history."
    mostly = queries.simulated_share(context.simulated, context.view) >= _MOSTLY_SIMULATED
    names = [s.name for s in signals]
    return absence.why_absent(names, mostly, _told(context, names))


def _told(context: Context, names: Sequence[str]) -> dict[str, Capability]:
    if context.view not in context.told:
        try:
            context.told[context.view] = absence.told(context.source, context.view)
        except KvscopeError:  # the card tells its own failure
            return {}
    return absence.capabilities(context.told[context.view], names)


def _in_part(context: Context, signals: Sequence[Signal]) -> str:
    """What to mind of signals that the engine feeds in part."""
    told = _told(context, [s.name for s in signals])
    return "; ".join(dict.fromkeys(each.reason for each in told.values() if each.status == "partial"))


def _card(
    context: Context, key: str, question: str, unit: str, note: str, signals: Sequence[Signal],
    build: Callable[[], Content], height: int,
) -> None:  # fmt: skip
    """A failing read or drawing is told inside its card; the other cards go on."""
    failed = ""
    try:
        content = build()
    except StoppedError as error:
        content = Content(absent=f"{error.reason} {error.next_step}")
    except KvscopeError as error:
        content, failed = Content(), f"{error.reason} {error.next_step}"
    except Exception:
        log.exception("card %s failed", key)
        content, failed = Content(), "This card failed; the log of the app has the reason. The others go on."
    context.cards[key] = Card(note, signals, content)
    heading = _heading(key, question, unit)
    with st.container(border=True, key=f"card-{key}"):
        drawn = content.figure is not None and not content.html
        if not drawn:
            st.html(heading)  # by itself: what changes under it must not take the focus from its button
        if failed or content.absent:
            kind, role = ("failed", ' role="alert"') if failed else ("absent", "")
            text = with_code(failed or content.absent)
            st.html(f'<div class="placeholder {kind}"{role} style="height:{height}px"><span>{text}</span></div>')
            return
        if content.html:
            st.html(content.html)
        if content.figure is not None:
            chosen = " ".join(st.query_params.get(name, "") for name in ("range", "end", "tz"))
            _chart(key=f"chart-{key}", data=content.figure.json(chosen, heading if drawn else ""))
        if content.below:
            st.html(content.below)
        if content.more[0]:
            _folded(key, *content.more)


def _heading(key: str, question: str, unit: str) -> str:
    """The question of a card, and the button of its menu."""
    small, whole = (f"<small>{escape(unit)}</small>", f"{question} ({unit})") if unit else ("", question)
    return (
        f'<h3 class="question" title="{escape(whole)}">{escape(question)}{small}</h3>'
        f'<button class="menu" data-card="{key}" title="{_MENU}" aria-label="{_MENU}: {escape(question)}" aria-haspopup="dialog"></button>'
    )


# What is folded away is most of what a page would send, so it comes when it is opened; as fragments of their own, so that opening it reads
# nothing again.


@st.fragment
def menu(context: Context) -> None:
    """The menu of the card whose button was pressed last. menu.js tells of the press; each opens one anew, as what Streamlit holds to be open
    the browser may have closed meanwhile. A menu for each card would be a fifth of all that a browser does for a page."""
    number, key = st.session_state.get("menu", (0, ""))
    pressed = _menus(key="menus", data=[*context.cards], on_card_change=lambda: None).card
    if pressed:
        number, key = st.session_state["menu"] = number + 1, str(pressed)
        st.session_state[f"menu-{number}"] = True
    if key not in context.cards:  # none yet, or one of another page
        return
    place = st.popover("", key=f"menu-{number}", on_change="rerun")
    if place.open:
        shown = context.cards[key]
        partly = _in_part(context, shown.signals) if shown.content.data is not None else ""
        note = f"{shown.note} This engine feeds it in part: {partly}." if partly else shown.note
        with place:
            _details(key, note, shown.signals, shown.content)


@st.fragment
def _folded(key: str, title: str, text: str) -> None:
    part = st.expander(title, key=f"more-{key}", on_change="rerun")
    if part.open:
        part.markdown(text)


def _details(key: str, note: str, signals: Sequence[Signal], content: Content) -> None:
    """How to read a card, the queries behind it, its data as CSV and Parquet, its chart as a picture."""
    if note:
        st.markdown(note)
    for signal in signals:
        st.caption(f"{signal.title} · recorded as `{signal.name}`")
        st.code(signal.promql, language="promql", wrap_lines=True)
    data = content.data
    with st.container(key=f"save-{key}", horizontal=True, gap="small"):
        if data is not None and not data.empty:
            for name, kind, write in (
                ("CSV", "text/csv", files.csv),
                ("Parquet", "application/vnd.apache.parquet", files.parquet),
            ):
                st.download_button(
                    f"Download {name}", functools.partial(write, data), f"kvscope-{key}.{name.lower()}", kind, key=f"{name.lower()}-{key}",
                    on_click="ignore",
                )  # fmt: skip
        if content.figure is not None:  # made in the browser, by save_picture.js
            st.html(
                "".join(
                    f'<button class="save" data-chart="{key}" data-format="{name}">Save {name.upper()}</button>'
                    for name in ("png", "svg")
                )
            )


def of_when(time: pd.Timestamp, view: View) -> str:
    """HTML that says which five minutes a make-up is of, where these are not the newest of the view."""
    if queries.is_current(time.timestamp(), view):
        return ""
    at = f"{moment(time.timestamp(), view.zone):%-d %b %H:%M}"
    return f'<p class="limits">Of the five minutes to {at}: no request was measured since.</p>'


def finding_html(finding: Finding, actions: int) -> str:
    """A finding with its evidence and its first `actions` actions."""
    evidence = "".join(f"<li>{escape(line)}</li>" for line in finding.evidence)
    do = "".join(f"<li>{escape(line)}</li>" for line in finding.actions[:actions])
    if finding.page:
        query = urlencode(st.query_params.to_dict())
        do += f'<li><a href="{finding.page}?{escape(query)}" target="_self">See {_PAGE_NAMES[finding.page]}</a></li>'
    if finding.runbook:
        do += f"<li>Runbook: {escape(finding.runbook)}{' (below)' if actions > 2 else ''}</li>"
    return (
        f'<div class="finding"><p class="headline">{escape(finding.headline)}</p><ul>{evidence}</ul>'
        f"<h4>What to do</h4><ul>{do}</ul></div>"
    )
