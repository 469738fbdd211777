"""The script that Streamlit runs: header, filters, and the chosen page inside a fragment that refreshes itself."""

from __future__ import annotations

import time

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from observability.app import queries, ui
from observability.app.happened import happened
from observability.app.pages import PAGES, AppPage
from observability.app.reads import StoppedError
from observability.app.sources import CachedSource, current_source
from observability.app.ui import Context, Selection
from observability.app.view import refresh_seconds
from observability.errors import KvscopeError


def main() -> None:
    """Draws the header and runs the chosen page."""
    st.set_page_config("kvscope", ui.LOGO, layout="wide", menu_items={"About": "kvscope: says why the P99 is bad."})
    ui.style()
    st.logo(ui.LOGO_WITH_NAME, size="large")
    source = current_source()
    models = known_models(source)
    chosen: list[AppPage] = []

    def entry(page: AppPage) -> StreamlitPage:
        return st.Page(
            lambda: chosen.append(page), title=page.title, url_path=page.path, icon=page.icon, default=not page.path
        )

    st.navigation([entry(page) for page in PAGES], position="top").run()
    # The filters belong to no page: so their values and their place in the URL outlive a change of page.
    selection = ui.controls(models)
    ui.stop_buttons()
    live = None if selection.end else refresh_seconds(selection.seconds)
    st.fragment(refresh, run_every=live)(chosen[0], selection, tuple(models))


def known_models(source: CachedSource) -> list[str]:
    """The models of the source, or those it last had; the page itself says when the source failed."""
    try:
        return source.models()
    except KvscopeError as error:
        try:
            return source.offline(error).models()
        except KvscopeError:
            return []


def refresh(page: AppPage, selection: Selection, models: tuple[str, ...]) -> None:
    """One refresh of the page: is the source alive, then the page's cards."""
    place, notices = ui.status_place(), st.container(key="notices")  # always there: a notice must not move the cards
    drawn = (page.path, selection)
    if st.session_state.get("drawn") != drawn:  # first sight of this page or choice: say that it is being read
        ui.status(place, "reading", "Reading…")
        st.session_state["drawn"] = drawn
        st.session_state.pop("stopped", None)
    stopped = StoppedError() if st.session_state.get("stopped") else None
    source, now = current_source(lambda seconds: ui.status(place, "reading", f"Reading… {seconds:.0f} s")), time.time()
    view = selection.view(now)
    try:
        if stopped is not None:
            raise stopped
        fresh = queries.freshness(source)
        if tuple(source.models()) != models:
            st.rerun()  # a source or a model appeared: the filters change with it
        simulated = source.simulated(view.start, view.end)
        marks = happened(source, view)
    except KvscopeError as error:
        with notices:
            ui.source_error(error, refresh_seconds(selection.seconds))
        if selection.model is not None or page.without_data:
            _draw(page, Context(source.offline(error), view, versus=selection.versus))
        if stopped is None:
            ui.status(place, "down", "Source unreachable")
        else:
            ui.status(place, "stopped", "Stopped")
        return
    if fresh.state == "empty" or selection.model is None:
        with notices:
            ui.empty_source(source.describe())
        if page.without_data:
            _draw(page, Context(source, view, versus=selection.versus))
    else:
        if fresh.state == "stale" and selection.end is None:
            with notices:
                ui.stale_source(fresh, selection.zone)
        _draw(page, Context(source, view, simulated, marks, selection.versus))
    ui.freshness_status(place, fresh, selection.zone, queries.simulated_share(simulated, view) > 0)


def _draw(page: AppPage, context: Context) -> None:
    page.draw(context)
    ui.menu(context)


main()
