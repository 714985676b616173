/* Refreshes the list of locks every few seconds; what is selected, focused and scrolled to stays so. */
"use strict";

(() => {
    const PERIOD = 5000;
    const PAUSED = "distlock-paused";
    const live = document.getElementById("distlock-live");
    const status = document.getElementById("distlock-status");
    const pause = document.getElementById("distlock-pause");
    let isAsking = false;
    let timer = 0;

    const isPaused = () => pause.getAttribute("aria-pressed") === "true";
    const boxes = () => [...live.querySelectorAll("input[name=selected]")];
    const count = () => live.querySelector("caption").textContent;

    function show(html) {
        const picked = new Set(boxes().filter((box) => box.checked).map((box) => box.value));
        const focused = live.contains(document.activeElement) ? document.activeElement.id : null;
        const before = count();
        live.innerHTML = html;
        for (const box of boxes()) {
            box.checked = picked.has(box.value);
        }
        if (focused !== null) {
            (document.getElementById(focused) || live).focus({ preventScroll: true });
        }
        // Screen readers are told of other numbers only, not of every refresh.
        if (count() !== before) {
            status.textContent = count();
        }
    }

    async function refresh() {
        if (isAsking || isPaused() || document.hidden || !getSelection().isCollapsed) {
            return;
        }
        isAsking = true;
        try {
            const response = await fetch(location.href, {
                headers: { "X-Distlock-Fragment": "yes" },
                // A login on another host could not be followed, and would look like a site that does not answer.
                redirect: "manual",
                // A connection that died silently would keep the page from asking again for minutes.
                signal: AbortSignal.timeout(2 * PERIOD),
            });
            const html = await response.text();
            if (response.headers.has("X-Distlock-Fragment")) {
                show(html);
            } else if (response.status < 500) {
                // Logged out, or not allowed any more.
                clearInterval(timer);
                status.textContent = status.dataset.stopped;
            }
        } catch {
            // The site does not answer: the next time it may.
        } finally {
            isAsking = false;
        }
    }

    function setPaused(paused) {
        pause.setAttribute("aria-pressed", String(paused));
        sessionStorage.setItem(PAUSED, String(paused));
        refresh();
    }

    live.classList.add("is-scripted");
    live.addEventListener("change", (event) => {
        if (event.target.id === "pick") {
            boxes().forEach((box) => { box.checked = event.target.checked; });
        }
    });
    pause.hidden = false;
    pause.setAttribute("aria-pressed", sessionStorage.getItem(PAUSED) || "false");
    pause.addEventListener("click", () => setPaused(!isPaused()));
    document.addEventListener("visibilitychange", refresh);
    timer = setInterval(refresh, PERIOD);
})();
