//! The page in Chromium.

use std::{env, fs, path::Path};

use base64::{Engine, prelude::BASE64_STANDARD};
use tokio::net::TcpListener;

use diy_mesh_proto::mesh::v1::traffic::Flow;
use diy_mesh_testkit::has_program;

use super::browser::Browser;
use super::fixture::{Fake, HOSTILE};
use super::{Sample, Server, server, token};

const MAX_PICTURE: usize = 200_000;
/// The colors of texts, with their contrast to both backgrounds.
const CONTRASTS: &str = "(() => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim();
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  const texts = ['--text', '--quiet', '--link', '--bad', '--warn', '--good'];
  return Math.min(...texts.flatMap((text) => ['--back', '--panel'].map((back) => contrast(light(text), light(back)))));
})()";

/// The number of nodes that lie over another one.
const OVERLAPS: &str = "(() => {
  const boxes = [...document.querySelectorAll('.node rect')].map((node) => node.getBoundingClientRect());
  return boxes.filter((one, index) => boxes.some((other, second) => second > index && one.left < other.right &&
    other.left < one.right && one.top < other.bottom && other.top < one.bottom)).length;
})()";

/// Runs a test with a browser beside a server, which it gets with the URL of the page.
async fn with_page(source: Fake, test: impl AsyncFnOnce(&mut Browser, &str, &Server<Fake>)) {
    if !has_program("chromium") {
        return;
    }
    let listener = TcpListener::bind(("127.0.0.1", 0)).await;
    let listener = listener.expect("a port is free");
    let port = listener.local_addr().expect("it is bound").port();
    let server = server(source, port);
    let url = format!("http://127.0.0.1:{port}/#token={}", token());
    let run = async {
        let mut browser = Browser::start().await;
        test(&mut browser, &url, &server).await;
    };
    tokio::select! {
        () = server.serve(listener) => unreachable!("it serves forever"),
        () = run => {}
    }
}

fn rows(table: &str) -> String {
    format!("document.querySelectorAll('#table-{table} tbody tr').length")
}

#[tokio::test]
async fn keyboard_reaches_the_cause_of_a_failure_among_200_workloads() {
    with_page(Fake::large(), async |browser, url, _| {
        browser.open(url).await;
        browser.wait(&format!("{} === 400", rows("edges"))).await;
        assert_eq!(
            browser
                .value("document.querySelector('#graph').hidden")
                .await,
            true
        );
        let label = "document.activeElement.getAttribute('aria-label') ?? ''";
        let mut pressed = 0;
        let what = "Why did requests fail: team-3/service-3 team-4/service-24";
        while browser.value(label).await != what {
            browser.press("Tab", 9).await;
            pressed += 1;
            assert!(pressed < 1000, "no key leads to {what}");
        }
        browser.press("Enter", 13).await;
        let page = "document.querySelector('#why-page').textContent";
        browser
            .wait(&format!("{page}.includes('answered connect-failed')"))
            .await;
        let page = browser.value(page).await;
        assert!(
            page.as_str().is_some_and(|page| page.contains(HOSTILE)),
            "{page}"
        );
        browser.press("Escape", 27).await;
        browser
            .wait("!document.querySelector('#why').open && !location.hash.includes('why')")
            .await;
        assert_eq!(browser.value(label).await, what);
    })
    .await;
}

#[tokio::test]
async fn focus_stays_while_the_table_is_sorted_filtered_and_renewed() {
    with_page(Fake::large(), async |browser, url, server| {
        browser.open(url).await;
        browser
            .wait(&format!("{} === 201", rows("workloads")))
            .await;
        let first = "document.querySelector('#table-workloads tbody a').textContent";
        browser
            .value("document.querySelector('#table-workloads th button').focus()")
            .await;
        for (expected, sort) in [(HOSTILE, "ascending"), ("team-9/service-99", "descending")] {
            browser.press("Enter", 13).await;
            let sorted = "document.querySelector('#table-workloads th').ariaSort";
            browser.wait(&format!("{sorted} === '{sort}'")).await;
            let first = browser.value(first).await;
            let first = first.as_str().expect("a name");
            assert!(first.ends_with(expected), "{first}");
        }
        browser
            .value("document.querySelector('#table-workloads tbody a').focus()")
            .await;
        let asked = server.source.asked.get();
        while server.source.asked.get() < asked + 2 {
            browser
                .value("new Promise((done) => setTimeout(done, 50))")
                .await;
        }
        assert_eq!(
            browser.value("document.activeElement.textContent").await,
            "team-9/service-99"
        );
        browser
            .value("document.querySelector('#filter').focus()")
            .await;
        let insert = serde_json::json!({"text": "Team-3/"});
        browser.call("Input.insertText", insert).await;
        browser.wait(&format!("{} === 20", rows("workloads"))).await;
    })
    .await;
}

#[tokio::test]
async fn names_of_proxies_are_text() {
    with_page(Fake::large(), async |browser, url, _| {
        browser
            .open(&format!("{url}&workload=team-0/service-0"))
            .await;
        browser
            .wait("document.body.innerText.includes('shop/only-web')")
            .await;
        for view in ["table", "graph"] {
            browser
                .value(&format!("document.querySelector('[value={view}]').click()"))
                .await;
            let shown =
                format!("document.querySelector('#{view}').textContent.includes({HOSTILE:?})");
            browser.wait(&shown).await;
        }
        assert_eq!(browser.value("document.images.length").await, 0);
        assert_eq!(browser.value("document.title").await, "DIY Service Mesh");
        let policies = "document.querySelector('#workload dl').textContent";
        let policies = browser.value(policies).await;
        assert!(
            policies.as_str().is_some_and(|text| text.contains(HOSTILE)),
            "{policies}"
        );
    })
    .await;
}

#[tokio::test]
async fn graph_has_callers_on_the_left_and_no_overlaps() {
    with_page(Fake::large(), async |browser, url, _| {
        browser.open(url).await;
        browser.wait(&format!("{} > 0", rows("workloads"))).await;
        browser
            .value("document.querySelector('[value=graph]').click()")
            .await;
        browser
            .wait("document.querySelectorAll('.node').length === 202")
            .await;
        assert_eq!(browser.value(OVERLAPS).await, 0);
        browser
            .value("document.querySelector('.node[aria-label^=\"team-3/service-3:\"]').focus()")
            .await;
        browser.press("Enter", 13).await;
        browser
            .wait("document.activeElement.id === 'workload-name'")
            .await;
        let near = browser
            .value("document.querySelectorAll('.node:not(.away)').length")
            .await;
        assert!(
            (2..=5).contains(&near.as_u64().expect("a number")),
            "{near}"
        );
    })
    .await;
    with_page(Fake::shop(), async |browser, url, _| {
        browser.open(url).await;
        browser.wait("document.querySelectorAll('.edge').length === 9").await;
        assert_eq!(browser.value(OVERLAPS).await, 0);
        let left = |name: &str| {
            format!("document.querySelector('.node[aria-label^=\"{name}\"]').getBoundingClientRect().left")
        };
        for (from, to) in [("(no identity)", "shop/web"), ("shop/cart", "pay/checkout")] {
            browser.wait(&format!("{} < {}", left(from), left(to))).await;
        }
        let failing = "document.querySelector('.edge[aria-label^=\"shop/cart to pay/checkout\"]')";
        let expected = format!("{failing}.textContent.includes('✕ 9%') && {failing}.href.baseVal.includes('why=')");
        browser.wait(&expected).await;
        browser.wait("document.querySelectorAll('.lock.open').length === 2").await;
    })
    .await;
}

#[tokio::test]
async fn opaque_connections_are_arrows_and_a_table() {
    let fake = Fake::shop();
    if let Ok(sample) = &mut *fake.sample.borrow_mut() {
        let flow = Flow {
            peer_namespace: "data".into(),
            peer: "redis".into(),
            connections: 4,
            connections_mutual_tls: 3,
            open: 2,
            bytes_sent: 300_000,
            ..Flow::default()
        };
        let mut pods = sample.pods.iter_mut();
        let web = pods.find(|pod| pod.workload == "web").expect("a pod");
        web.traffic.flows.push(flow);
    }
    with_page(fake, async |browser, url, _| {
        browser.open(url).await;
        let edge = "document.querySelector('.edge[aria-label=\"shop/web to data/redis: 4 TCP connections, 75% with mutual TLS\"]')";
        browser.wait(&format!("{edge}?.querySelector('.lock.open') != null")).await;
        assert_eq!(browser.value(OVERLAPS).await, 0);
        browser
            .value("document.querySelector('[value=table]').click()")
            .await;
        let row = "document.querySelector('#table-tcp tbody tr')?.innerText.split(/\\s+/).join(' ')";
        browser
            .wait(&format!("{row} === 'shop/web data/redis 4 2 3.0 0.0 75%'"))
            .await;
    })
    .await;
}

#[tokio::test]
async fn service_leads_to_its_workloads() {
    let fake = Fake::shop();
    if let Ok(sample) = &mut *fake.sample.borrow_mut() {
        let pods = sample.pods.iter_mut().filter(|pod| pod.namespace == "data");
        for (pod, name) in pods.zip(["index-v1", HOSTILE]) {
            (pod.workload, pod.services) = (name.into(), vec!["index".into()]);
            // A workload that calls its own Service.
            let mut call = pod.traffic.flows[0].clone();
            (call.inbound, call.peer_namespace) = (false, "data".into());
            call.peer = "index".into();
            pod.traffic.flows.push(call);
        }
    }
    with_page(fake, async |browser, url, _| {
        browser.open(url).await;
        let lead = "document.querySelectorAll('.lead').length === 2";
        browser.wait(lead).await;
        let label = "document.querySelector('.node[aria-label^=\"data/index:\"]').ariaLabel";
        let expected = format!("data/index: Service of data/{HOSTILE}, data/index-v1");
        assert_eq!(browser.value(label).await, expected);
        assert_eq!(browser.value(OVERLAPS).await, 0);
    })
    .await;
}

#[tokio::test]
async fn workload_shows_exchanges_certificate_policies_and_ejections() {
    with_page(Fake::shop(), async |browser, url, _| {
        browser.open(&format!("{url}&workload=shop/cart")).await;
        for text in [
            "spiffe://cluster.local/ns/shop/sa/cart, valid until 2026-11-28T17:00:00Z",
            "shop/only-web",
            "only callers with mutual TLS",
            "pay/limits",
            "pay/canary",
            "✕ 10.244.2.3:80 pay/checkout-1 ejected (consecutive); 2 endpoints",
            "✕ connect-failed",
            "Pod shop/cart-2",
            "timed out",
            "2 more pods are not asked.",
        ] {
            let text = serde_json::to_string(text).expect("a string");
            browser
                .wait(&format!(
                    "document.querySelector('#workload').innerText.includes({text})"
                ))
                .await;
        }
        browser
            .value("document.querySelector('#workload [href*=why]').click()")
            .await;
        browser
            .wait("document.querySelector('#why-page').textContent.includes('connect-failed')")
            .await;
        browser.value("history.back()").await;
        browser.wait("!document.querySelector('#why').open").await;
        browser
            .value("document.querySelector('#leave').click()")
            .await;
        browser
            .wait("document.querySelector('#workload').hidden")
            .await;
    })
    .await;
}

#[tokio::test]
async fn page_says_why_it_is_empty_and_how_old_its_data_is() {
    let notes = "document.querySelector('#notes').innerText";
    with_page(Fake::shop(), async |browser, url, server| {
        *server.source.sample.borrow_mut() = Ok(Sample::default());
        browser.open(url).await;
        browser
            .wait("!document.querySelector('#empty').hidden")
            .await;
        *server.source.sample.borrow_mut() = Err(format!("no controller: {HOSTILE}"));
        browser
            .wait(&format!("{notes}.includes({HOSTILE:?})"))
            .await;
        browser
            .wait("/^This data is \\d+ s old/.test(document.querySelector('#stale').innerText)")
            .await;
        let (wrong, right) = (url.replace("token=", "token=0"), url);
        browser.open(&wrong).await;
        browser
            .wait(&format!(
                "{notes}.includes('open the URL that `mesh dashboard` printed')"
            ))
            .await;
        browser.open(right).await;
        browser
            .wait(&format!("{notes}.includes('no controller')"))
            .await;
    })
    .await;
}

/// With `UPDATE_PICTURES=1`, it writes the pictures of the documents.
#[tokio::test]
async fn page_is_readable_in_light_and_dark() {
    with_page(Fake::shop(), async |browser, url, _| {
        let mut backgrounds = Vec::new();
        for scheme in ["light", "dark"] {
            browser.prefer(scheme).await;
            browser.open(url).await;
            browser
                .wait("document.querySelectorAll('.edge').length === 9")
                .await;
            let contrast = browser.value(CONTRASTS).await;
            assert!(contrast.as_f64() >= Some(4.5), "{scheme}: {contrast}");
            let background = "getComputedStyle(document.body).backgroundColor";
            backgrounds.push(browser.value(background).await);
            let picture = BASE64_STANDARD.decode(browser.picture().await);
            let picture = picture.expect("it is Base64");
            assert!(picture.len() < MAX_PICTURE, "{scheme}: {}", picture.len());
            if env::var_os("UPDATE_PICTURES").is_some() {
                let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/images");
                fs::create_dir_all(&folder).expect("docs is writable");
                let written = fs::write(folder.join(format!("dashboard-{scheme}.png")), picture);
                written.expect("docs is writable");
            }
        }
        assert_ne!(backgrounds[0], backgrounds[1]);
    })
    .await;
}

/// The errors in the graph: lines behind nodes, and texts that are longer than their place.
const HIDDEN: &str = "(() => {
    const nodes = [...document.querySelectorAll('.node')].map((node) => {
        const { e: x, f: y } = node.transform.baseVal.consolidate().matrix;
        const { width, height } = node.firstChild.getBBox();
        return { node, x, y, width, height };
    });
    const label = (node) => node.getAttribute('aria-label');
    const texts = nodes.flatMap(({ node, width }) => [...node.querySelectorAll('text')].filter((text) => {
        const { x, width: length } = text.getBBox();
        return x + length > width || text.textContent.includes('…');
    }).map((text) => `cut: ${text.textContent}`));
    const lines = [...document.querySelectorAll('.edge')].flatMap((edge) => {
        const path = edge.querySelector('.flow');
        const end = path.getPointAtLength(path.getTotalLength());
        const note = edge.querySelector('.note');
        const { e: at } = note.transform.baseVal.consolidate().matrix;
        const { x, width } = note.querySelector('.label').getBBox();
        const hidden = nodes.filter((node) => {
            for (let length = 0; length < path.getTotalLength(); length += 2) {
                const point = path.getPointAtLength(length);
                const inside = (value, from, size) => value > from + 1 && value < from + size - 1;
                if (inside(point.x, node.x, node.width) && inside(point.y, node.y, node.height)) return true;
            }
        });
        return [...hidden.map(({ node }) => `${label(edge)} behind ${label(node)}`),
            ...(at + x + width > end.x ? [`label cut: ${label(edge)}`] : [])];
    });
    return [...texts, ...lines].join('\\n');
})()";

#[tokio::test]
async fn graph_hides_no_line_and_cuts_no_label() {
    with_page(Fake::long(), async |browser, url, _| {
        browser.open(url).await;
        browser
            .wait("document.querySelectorAll('.edge').length === 7")
            .await;
        assert_eq!(browser.value(HIDDEN).await, "");
    })
    .await;
}
