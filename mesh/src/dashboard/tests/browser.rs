//! Chromium without a window, driven by the DevTools protocol through a pipe.

use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Passes the pipe as the descriptors 3 and 4.
const START: &str = "exec chromium \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1";
/// For a browser that hangs.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A browser with one tab.
pub struct Browser {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    session: Value,
    sent: u64,
    _process: Child,
    _profile: TempDir,
}

impl Browser {
    /// Starts it. The window has a size of 1280 x 800.
    pub async fn start() -> Self {
        let profile = TempDir::new().expect("there is room");
        let mut command = Command::new("sh");
        command.args([
            "-c",
            START,
            "sh",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
        ]);
        command.args([
            "--remote-debugging-pipe",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]);
        command.args(["--disable-background-networking", "--window-size=1280,800"]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut process = command.spawn().expect("sh starts");
        let mut browser = Self {
            input: process.stdin.take().expect("it is piped"),
            output: BufReader::new(process.stdout.take().expect("it is piped")),
            session: Value::Null,
            sent: 0,
            _process: process,
            _profile: profile,
        };
        let tab = browser
            .call("Target.createTarget", json!({"url": "about:blank"}))
            .await;
        let attach = json!({"targetId": tab["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach).await;
        browser.session = attached["sessionId"].clone();
        browser
    }

    /// The result of a command.
    pub async fn call(&mut self, method: &str, params: Value) -> Value {
        self.sent += 1;
        let mut message = json!({"id": self.sent, "method": method, "params": params});
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        let message = format!("{message}\0");
        let written = self.input.write_all(message.as_bytes()).await;
        written.expect("chromium runs");
        let answer = tokio::time::timeout(TIMEOUT, self.answer()).await;
        let mut answer = answer.unwrap_or_else(|_| panic!("{method} {params} hangs"));
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].take()
    }

    async fn answer(&mut self) -> Value {
        loop {
            let mut message = Vec::new();
            let read = self.output.read_until(0, &mut message).await;
            assert!(read.is_ok_and(|length| length > 0), "chromium has ended");
            message.pop();
            let message: Value = serde_json::from_slice(&message).expect("it is JSON");
            if message["id"] == self.sent {
                return message;
            }
        }
    }

    /// Opens a page in the tab.
    pub async fn open(&mut self, url: &str) {
        // A change of the fragment alone would load nothing.
        for url in ["about:blank", url] {
            self.call("Page.navigate", json!({"url": url})).await;
        }
    }

    /// The value of an expression in the page.
    pub async fn value(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut result = self.call("Runtime.evaluate", params).await;
        assert!(
            result["exceptionDetails"].is_null(),
            "{expression}: {result}"
        );
        result["result"]["value"].take()
    }

    /// Waits until an expression is true. It may fail before: the page may not be there yet.
    pub async fn wait(&mut self, expression: &str) {
        let checked = format!("(() => {{ try {{ return {expression} }} catch {{ }} }})()");
        let waits = async {
            while self.value(&checked).await != true {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let is_true = tokio::time::timeout(TIMEOUT, waits).await.is_ok();
        if !is_true {
            let page = self.value("document.body.innerText").await;
            panic!("{expression} does not become true:\n{page}");
        }
    }

    /// Presses a key.
    pub async fn press(&mut self, key: &str, code: u32) {
        for kind in ["rawKeyDown", "char", "keyUp"] {
            let text = if key == "Enter" { "\r" } else { "" };
            if kind == "char" && text.is_empty() {
                continue;
            }
            let params = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
            self.call("Input.dispatchKeyEvent", params).await;
        }
    }

    /// The preferred color scheme: `light` or `dark`.
    pub async fn prefer(&mut self, scheme: &str) {
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", json!({"features": features}))
            .await;
    }

    /// The page as PNG, in Base64.
    pub async fn picture(&mut self) -> String {
        let height = self.value("document.body.offsetHeight").await;
        let clip = json!({"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1});
        let params = json!({"format": "png", "clip": clip, "captureBeyondViewport": true});
        let picture = self.call("Page.captureScreenshot", params).await;
        picture["data"].as_str().expect("a picture").to_owned()
    }
}
