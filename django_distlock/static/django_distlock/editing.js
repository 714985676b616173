/* Renews the lock of an object while its form is open, tells who has it otherwise, and gives it back at the end. */
"use strict";

// A page with several forms has this script several times.
for (const box of document.querySelectorAll(".distlock-edit")) {
    if (box.isAlive) {
        continue;
    }
    box.isAlive = true;
    const form = box.closest("form");
    const ticket = form.querySelector("[name=distlock_edit]"); // a form may have a field called "elements"
    const message = box.querySelector(".distlock-edit-message");
    const takeOver = box.querySelector(".distlock-edit-take-over");
    const isReading = box.dataset.reading === "yes";
    let timer = 0;
    let isAsking = false;
    let failures = 0;
    let isOld = false;
    // What the page asks for next: "begin", also from another page of this user; "take"; "renew".
    let next = "renew";
    let isSent = false;
    // A page that comes back is another one for the server, as a tab may have a copy of it, and so is one that has lost
    // the lock.
    let life = "";

    function another() {
        return crypto.getRandomValues(new Uint32Array(4)).join("-");
    }

    const TOKEN = "input[name=csrfmiddlewaretoken]";

    function body(what) {
        const token = form.querySelector(TOKEN) || document.querySelector(TOKEN);
        return new URLSearchParams({
            csrfmiddlewaretoken: token ? token.value : "",
            distlock_edit: ticket.value,
            what,
            life,
        });
    }

    function tell(text, digest) {
        // Screen readers are told of what is new only.
        if (message.textContent !== text) {
            message.textContent = text;
        }
        const choice = takeOver.querySelector("input");
        if (choice) {
            if (choice.value !== digest) {
                choice.checked = false;
                choice.value = digest;
            }
            takeOver.hidden = !digest;
        }
    }

    async function read(options) {
        // A connection that died silently would keep the page from asking again for minutes.
        const signal = AbortSignal.timeout(2000 * box.dataset.pause);
        const response = await fetch(box.dataset.url, { redirect: "manual", signal, ...options });
        if (response.type === "opaqueredirect" || response.status === 401) {
            return { state: "refused", message: box.dataset.refused };
        }
        if (response.status === 403) {
            return { state: "forbidden" };
        }
        return response.json();
    }

    async function ask(what) {
        const told = await read({ method: "POST", body: body(what) });
        if (told.state !== "forbidden") {
            return told;
        }
        // After another login, the page's token is not valid any more.
        const fresh = await read({});
        if (fresh.csrf) {
            document.querySelectorAll(TOKEN).forEach((each) => { each.value = fresh.csrf; });
            return read({ method: "POST", body: body(what) });
        }
        return fresh;
    }

    async function renew() {
        // The view that saves a form that was sent releases the lock: the page must not take it again.
        if (isAsking || isSent || !box.isAlive) {
            return;
        }
        if (!box.isConnected) { // htmx or Turbo has taken the form out of the page
            leave();
            box.isAlive = false;
            return;
        }
        isAsking = true;
        clearTimeout(timer);
        try {
            let told = await ask(isReading ? "look" : next);
            if (told.state === "lost") {
                life = another();
                next = "take";
                if (isSent) {
                    return;
                }
                told = await ask(next);
            }
            next = "renew";
            if (told.state === "busy") { // servers may refuse an owner that they have refused before
                life = another();
                next = "take";
            }
            failures = 0;
            isOld = isOld || told.state === "changed";
            if (told.state !== "held") {
                tell(told.message ?? box.dataset.refused, told.take_over || "");
            } else if (!isOld) {
                tell("", "");
            }
        } catch {
            failures += 1;
            if (failures === 3) {
                tell(box.dataset.offline, "");
            }
        } finally {
            isAsking = false;
            const seconds = document.hidden ? box.dataset.ttl / 3 : box.dataset.pause;
            timer = setTimeout(renew, box.isConnected ? seconds * 1000 : 0);
        }
    }

    function leave() {
        clearTimeout(timer);
        if (!isReading && box.isAlive) {
            // A request that is under way may take the lock later: that of a form that was sent is free before this page goes.
            navigator.sendBeacon(box.dataset.url, body(isAsking ? "abandon" : "leave"));
        }
    }

    // Only now has the browser restored what was typed before Back or F5. The ticket is restored with it, as it counts as
    // typed, too: so old text is compared as old text.
    function show(event) {
        const text = ticket.value;
        isSent = false;
        const isBack = event.persisted || text !== ticket.defaultValue;
        next = isBack ? "begin" : "renew";
        life = isBack ? another() : "";
        ticket.value = "";
        ticket.value = text;
        renew();
    }

    addEventListener("pagehide", leave);
    addEventListener("pageshow", show);
    if (document.readyState === "complete") {
        show({}); // htmx or Turbo has put the form into a page that was there before
    }
    // The second click of an impatient user would add the new rows of inlines once more. After 10 seconds without an
    // answer, the form can be sent again. At the window, as the page's own scripts may decide that it is not sent.
    addEventListener("submit", (event) => {
        if (event.target !== form || event.defaultPrevented || event.submitter?.formTarget) {
            return; // such as a button that opens a preview: the page stays
        }
        if (isSent) {
            event.preventDefault();
        } else {
            isSent = true;
            setTimeout(() => { isSent = false; renew(); }, 10000);
        }
    });
    document.addEventListener("visibilitychange", () => {
        if (!document.hidden) {
            renew();
        }
    });
}
