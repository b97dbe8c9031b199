//! An API server for tests, with faults: `sandbox-api-server PORT FOLDER FAULT` serves the objects of
//! a catalog folder, to be listed and watched, and nothing else. The word in the file FAULT is the
//! fault of all responses while it is there: `slow`, `silent`, `wrong` or `closed`. Prints the
//! requests that have got such a response.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{env, fs, process, thread};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// The interval at which the files are read.
const INTERVAL: Duration = Duration::from_millis(20);
/// The delay of a slow response.
const SLOW: Duration = Duration::from_secs(3);
/// Wrong responses, which follow each other.
const WRONG: [&str; 4] = [
    "500 Internal Server Error\r\n\r\nno leader",
    "200 OK\r\nContent-Type: text/html\r\n\r\n<html>Welcome</html>",
    "200 OK\r\nContent-Type: application/json\r\n\r\n{\"kind\": \"List\", \"items\": [{",
    "429 Too Many Requests\r\nRetry-After: 1\r\n\r\n",
];

struct Server {
    fault: String,
    wrong: AtomicUsize,
    history: Mutex<History>,
}

/// The objects of the folder, and their changes. Resource versions are numbers of changes.
struct History {
    folder: String,
    read: Instant,
    /// With the texts of their files.
    objects: BTreeMap<PathBuf, (String, Value)>,
    changes: Vec<(&'static str, Value)>,
}

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let Ok([port, folder, fault]) = <[String; 3]>::try_from(arguments) else {
        eprintln!("usage: sandbox-api-server PORT FOLDER FAULT");
        process::exit(2);
    };
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port.parse()?))?;
    let server = Server {
        fault,
        wrong: AtomicUsize::new(0),
        history: Mutex::new(History {
            folder,
            read: Instant::now(),
            objects: BTreeMap::new(),
            changes: Vec::new(),
        }),
    };
    thread::scope(|scope| {
        for stream in listener.incoming() {
            let (stream, server) = (stream?, &server);
            scope.spawn(move || {
                if let Err(error) = server.serve(&stream) {
                    eprintln!("{error:#}");
                }
            });
        }
        Ok(())
    })
}

impl Server {
    /// Serves one request.
    fn serve(&self, mut stream: &TcpStream) -> Result<()> {
        let mut lines = BufReader::new(stream).lines();
        let request = lines.next().context("no request")??;
        while !lines.next().context("no end of the fields")??.is_empty() {}
        let fault = self.fault();
        if !fault.is_empty() {
            println!("{fault}: {request}");
        }
        match &*fault {
            "slow" => thread::sleep(SLOW),
            "silent" => self.repeat(&fault, || Ok(()))?,
            "wrong" => {
                let number = self.wrong.fetch_add(1, Ordering::Relaxed);
                write!(stream, "HTTP/1.0 {}", WRONG[number % WRONG.len()])?;
            }
            _ => {}
        }
        if !["", "slow"].contains(&&*fault) {
            return Ok(());
        }
        let mut words = request.split(' ');
        let (method, target) = (words.next(), words.next().unwrap_or_default());
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        if method != Some("GET") || path.contains("/namespaces/") {
            let status = json!({"kind": "Status", "status": "Failure", "code": 404, "message": "not found", "reason": "NotFound"});
            let status = status.to_string();
            return Ok(write!(stream, "HTTP/1.0 404 Not Found\r\n\r\n{status}")?);
        }
        let head = "HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n";
        if !query.contains("watch=true") {
            let history = self.history()?;
            let objects = history.objects.values().map(|(_, object)| object);
            let mut items: Vec<Value> = objects.filter(|one| is_in(one, path)).cloned().collect();
            items.extend(definition(path, query));
            let metadata = json!({"resourceVersion": history.changes.len().to_string()});
            let list = json!({"kind": "List", "items": items, "metadata": metadata});
            return Ok(write!(stream, "{head}{list}")?);
        }
        stream.write_all(head.as_bytes())?;
        let mut parameters = query.split('&');
        let known = parameters.find_map(|one| one.strip_prefix("resourceVersion="));
        let mut known: usize = known.context("no resourceVersion")?.parse()?;
        self.repeat(&fault, || {
            let history = self.history()?;
            let new = &history.changes[known..];
            known += new.len();
            for (kind, object) in new.iter().filter(|(_, one)| is_in(one, path)) {
                writeln!(stream, "{}", json!({"type": kind, "object": object}))?;
            }
            Ok(())
        })
    }

    /// Repeats a step until the fault changes.
    fn repeat(&self, fault: &str, mut step: impl FnMut() -> Result<()>) -> Result<()> {
        while self.fault() == fault {
            step()?;
            thread::sleep(INTERVAL);
        }
        Ok(())
    }

    fn fault(&self) -> String {
        // Without the file, there is none.
        let text = fs::read_to_string(&self.fault).unwrap_or_default();
        text.trim().to_owned()
    }

    fn history(&self) -> Result<MutexGuard<'_, History>> {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        if history.changes.is_empty() || history.read.elapsed() > INTERVAL {
            history.update()?;
        }
        Ok(history)
    }
}

impl History {
    /// Reads the files.
    fn update(&mut self) -> Result<()> {
        self.read = Instant::now();
        let mut texts = BTreeMap::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path
                .extension()
                .is_some_and(|extension| extension == "yaml")
            {
                // It may have been deleted since.
                texts.extend(fs::read_to_string(&path).ok().map(|text| (path, text)));
            }
        }
        let deleted = self
            .objects
            .extract_if(.., |file, _| !texts.contains_key(file));
        let deleted: Vec<Value> = deleted.map(|(_, (_, object))| object).collect();
        for object in deleted {
            self.change("DELETED", object);
        }
        for (file, text) in texts {
            let kind = match self.objects.get(&file) {
                Some((known, _)) if *known == text => continue,
                Some(_) => "MODIFIED",
                None => "ADDED",
            };
            let object = self.change(kind, serde_json::from_str(&text)?);
            self.objects.insert(file, (text, object));
        }
        Ok(())
    }

    /// Records a change. Returns the object with its version.
    fn change(&mut self, kind: &'static str, mut object: Value) -> Value {
        let version = self.changes.len() + 1;
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        self.changes.push((kind, object.clone()));
        object
    }
}

/// The definition of the kind that a request for definitions names: all kinds are installed.
fn definition(path: &str, query: &str) -> Option<Value> {
    path.strip_suffix("/customresourcedefinitions")?;
    let mut parameters = query.split('&');
    let name = parameters.find_map(|one| one.strip_prefix("fieldSelector=metadata.name%3D"))?;
    let versions = ["v1", "v1alpha1", "v1alpha2", "v1alpha3", "v1alpha4"];
    let versions = versions.map(|version| json!({"name": version, "served": true}));
    let metadata = json!({"name": name, "resourceVersion": "1"});
    Some(json!({"metadata": metadata, "spec": {"versions": versions}}))
}

/// Whether a path is the path of all objects of the kind of this one.
fn is_in(object: &Value, path: &str) -> bool {
    let (version, kind) = (&object["apiVersion"], &object["kind"]);
    let (Some(version), Some(kind)) = (version.as_str(), kind.as_str()) else {
        return false;
    };
    let kind = kind.to_lowercase();
    let plural = match kind.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None => format!("{kind}s"),
    };
    let root = if version.contains('/') { "apis" } else { "api" };
    path == format!("/{root}/{version}/{plural}")
}
