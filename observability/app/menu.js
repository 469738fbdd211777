// The menu of the cards of a page: tells the app whose button was pressed, and keeps what the app then opens at that button. Streamlit's own
// button for it is not to be seen, so this cares for the focus.
let card = ""; // whose button was pressed last
let asked = ""; // on which page, while it is not answered
let watch; // while a menu is awaited or open
let tell; // the app, by the component of now
let leave = () => {};

const reading = () => document.querySelector(".st-key-status .pill.reading");
const button = () => document.querySelector(`button.menu[data-card="${CSS.escape(card)}"]`);
const body = () => document.querySelector('[data-testid="stPopoverBody"]');

const put = () => {
  const page = document.querySelector(".stMainBlockContainer");
  const at = button()?.getBoundingClientRect();
  if (!at) return;
  const { left, top } = page.getBoundingClientRect();
  page.style.setProperty("--menu-left", `${at.left - left}px`);
  page.style.setProperty("--menu-top", `${at.top - top}px`);
};

const opened = (menu, byKeys) => {
  asked = "";
  const { ariaLabel } = Object.assign(button() ?? {}, { ariaExpanded: "true" });
  Object.assign(menu, { ariaLabel, tabIndex: -1, id: "card-menu" });
  button()?.setAttribute("aria-controls", menu.id);
  if (byKeys && document.activeElement === button()) menu.focus();
};

const closed = () => {
  clearInterval(watch);
  for (const each of document.querySelectorAll("button.menu[aria-expanded]"))
    for (const name of ["aria-expanded", "aria-controls"]) each.removeAttribute(name);
  if (document.activeElement === document.body) button()?.focus({ preventScroll: true });
};

const drop = () => {
  asked = ""; // the reader went to another page
  clearInterval(watch);
};

const follow = (byKeys) => {
  const before = body();
  let [menu, waited] = [undefined, 0];
  clearInterval(watch);
  watch = setInterval(() => {
    const now = body();
    if (asked && asked !== location.pathname) drop();
    if (asked && !reading() && ++waited % 30 === 0) tell(card); // three seconds: it was lost
    if (menu && !now) closed();
    else if (now && now !== before && now !== menu) opened((menu = now), byKeys);
    if (now) put();
  }, 100);
};

export default ({ setTriggerValue }) => {
  leave();
  tell = (each) => setTriggerValue("card", each);
  if (asked === location.pathname) tell(card); // it told a component that is gone, of the page before this was read
  let closing = false; // by this very press, as one beside the menu
  const down = ({ target }) => {
    closing = Boolean(body()) && target.closest?.("button.menu")?.dataset.card === card;
  };
  const press = ({ target, detail }) => {
    const pressed = target.closest?.("button.menu");
    if (!pressed) return;
    const again = body() && pressed.dataset.card === card;
    if (detail ? closing : again) {
      if (!detail) body().dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
      return;
    }
    card = pressed.dataset.card;
    asked = location.pathname;
    put();
    follow(!detail);
    tell(card);
  };
  document.addEventListener("pointerdown", down, true);
  document.addEventListener("click", press);
  leave = () => {
    document.removeEventListener("pointerdown", down, true);
    document.removeEventListener("click", press);
  };
  return leave;
};
