// The menu of the cards of a page: tells the app whose button was pressed, and where the menu that the app then opens has to stand.
let card = ""; // whose button was pressed last
let leave = () => {};

const isOpen = () => Boolean(document.querySelector('[class*="st-key-menu-"] [aria-expanded="true"]'));

const put = (button) => {
  const page = document.querySelector(".stMainBlockContainer");
  const { left, top } = page.getBoundingClientRect();
  const at = button.getBoundingClientRect();
  page.style.setProperty("--menu-left", `${at.left - left}px`);
  page.style.setProperty("--menu-top", `${at.top - top}px`);
};

// By keys the focus goes into the menu that opens and back to its button; Streamlit's own button for it is not to be seen.
const body = () => document.querySelector('[data-testid="stPopoverBody"]');

const soon = (ready, act, tries = 100) => {
  if (ready()) act();
  else if (tries) setTimeout(() => soon(ready, act, tries - 1), 50);
};

const enter = () => {
  body().tabIndex = -1;
  body().focus();
};

export default ({ setTriggerValue }) => {
  leave();
  let closed = ""; // by this very press, as one beside the menu
  const down = () => {
    closed = isOpen() ? card : "";
  };
  const press = ({ target, detail }) => {
    const button = target.closest?.("button.menu");
    if (!button || button.dataset.card === closed) return;
    card = button.dataset.card;
    put(button);
    setTriggerValue("card", card);
    if (!detail) soon(body, enter);
  };
  const key = ({ key }) => {
    if (key === "Escape" && isOpen()) soon(() => !body(), () => document.querySelector(`button.menu[data-card="${CSS.escape(card)}"]`)?.focus());
  };
  document.addEventListener("pointerdown", down, true);
  document.addEventListener("click", press);
  document.addEventListener("keydown", key, true);
  leave = () => {
    document.removeEventListener("pointerdown", down, true);
    document.removeEventListener("click", press);
    document.removeEventListener("keydown", key, true);
  };
  return leave;
};
