//! The socket of a sandbox on the host, at which other processes of its user ask about its pods over
//! HTTP/1. It changes nothing. `GET /pods` lists the pods as JSON; `GET
//! /pods/NAMESPACE/NAME/admin/PAGE` is a page of the admin server of the pod's proxy. Only the user
//! has access to the directory of the socket, so that no other user can read or replace it.

use std::{
    convert::Infallible,
    env, fs,
    io::{self, ErrorKind},
    net::IpAddr,
    os::unix::{
        self,
        fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode, body::Incoming, server::conn::http1, service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::unistd::{Uid, geteuid};
use serde::{Deserialize, Serialize};
use tokio::{
    net::{UnixListener, UnixStream},
    runtime::{Builder, Runtime},
    task, time,
};

use crate::{client::Shared, page::Page, protocol::PodView};

/// The time for the head of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The time after an error of the listener, such as too many open files.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);
/// The number of pages that are read at the same time. Others wait.
const MAX_PAGES: usize = 8;

/// A pod in the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The name of the workload.
    pub workload: String,
    /// The Services of its namespace that it is an endpoint of.
    pub services: Vec<String>,
    /// Its addresses.
    pub ips: Vec<IpAddr>,
    /// Whether it has a proxy.
    pub injected: bool,
    /// Whether all containers are ready.
    pub ready: bool,
}

/// Why there is no socket, or no connection to it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another user has access to the directory.
    #[error(
        "{directory} {problem}, expected a directory with mode 0700 of user {uid}: remove it, or set XDG_RUNTIME_DIR to such a directory"
    )]
    Directory {
        /// The directory of the socket.
        directory: PathBuf,
        /// The problem of the directory.
        problem: String,
        /// The user.
        uid: Uid,
    },
    /// Another process serves this socket.
    #[error("another demo of this user runs, and has the socket {0}")]
    InUse(PathBuf),
    /// No process serves this socket.
    #[error("no demo of this user runs (socket {0}): start one with `mesh demo`")]
    NotServed(PathBuf),
    /// A system call failed.
    #[error("cannot use the socket of the demo: {0}")]
    Io(#[from] io::Error),
}

/// Where the demo of this user has its socket.
pub fn demo_socket() -> PathBuf {
    let session = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    match session.filter(|directory| directory.is_dir()) {
        Some(directory) => directory.join("diy-service-mesh-demo.sock"),
        None => PathBuf::from(format!("/tmp/diy-service-mesh-{}/demo.sock", geteuid())),
    }
}

/// Connects to the socket of a demo.
pub async fn connect(path: &Path) -> Result<UnixStream, Error> {
    check_directory(path, geteuid())?;
    UnixStream::connect(path)
        .await
        .map_err(|error| Error::connect(path, error))
}

impl Error {
    fn connect(path: &Path, error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => Self::NotServed(path.to_owned()),
            _ => Self::Io(error),
        }
    }
}

/// A served socket. Dropping it removes the socket, and its directory if that was created for it.
#[derive(Debug)]
pub struct Server {
    path: PathBuf,
    created: Option<PathBuf>,
    runtime: Option<Runtime>,
}

impl Server {
    pub(crate) fn start(path: &Path, shared: Arc<Shared>) -> Result<Self, Error> {
        let (listener, created) = bind(path)?;
        // From here on, the socket is removed if something fails.
        let mut server = Self {
            path: path.to_owned(),
            created,
            runtime: None,
        };
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(MAX_PAGES)
            .thread_name("sandbox-socket")
            .enable_all()
            .build()?;
        let runtime = server.runtime.insert(runtime);
        let entered = runtime.enter();
        runtime.spawn(serve(UnixListener::from_std(listener)?, shared));
        drop(entered);
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if someone else has removed it.
        let _ = fs::remove_file(&self.path);
        let _ = self.created.take().map(fs::remove_dir);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Binds the socket, in place of the socket of a process that has died. Returns its directory, too,
/// if there was none.
fn bind(path: &Path) -> Result<(unix::net::UnixListener, Option<PathBuf>), Error> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let created = match fs::DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => Some(directory.to_owned()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => None,
        Err(error) => return Err(error.into()),
    };
    check_directory(path, geteuid())?;
    if unix::net::UnixStream::connect(path).is_ok() {
        return Err(Error::InUse(path.to_owned()));
    }
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let listener = unix::net::UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    Ok((listener, created))
}

/// Fails if another user than this one has access to the directory of a socket.
fn check_directory(path: &Path, uid: Uid) -> Result<(), Error> {
    let directory = path.parent().unwrap_or(Path::new("."));
    let metadata = fs::symlink_metadata(directory).map_err(|error| Error::connect(path, error))?;
    let mode = metadata.mode() & 0o777;
    let problem = match () {
        () if !metadata.is_dir() => "is no directory".into(),
        () if metadata.uid() != uid.as_raw() => format!("belongs to user {}", metadata.uid()),
        () if mode != 0o700 => format!("has mode {mode:04o}"),
        () => return Ok(()),
    };
    Err(Error::Directory {
        directory: directory.to_owned(),
        problem,
        uid,
    })
}

async fn serve(listener: UnixListener, shared: Arc<Shared>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            time::sleep(ACCEPT_BACKOFF).await;
            continue;
        };
        let shared = shared.clone();
        let service = service_fn(move |request| respond(request, shared.clone()));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIMEOUT)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), service);
        // Fails if the client leaves.
        task::spawn(async { connection.await.ok() });
    }
}

async fn respond(
    request: Request<Incoming>,
    shared: Arc<Shared>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let target = request.uri().path_and_query();
    let asked = Asked::parse(target.map_or("/", |target| target.as_str()));
    let (status, body) = match asked {
        _ if request.method() != Method::GET => (405, "only GET is served\n".into()),
        None => (404, "no such page\n".into()),
        Some(Asked::Pods) => (200, pods(&shared)),
        Some(Asked::AdminPage { pod, path }) => {
            let page = task::spawn_blocking(move || shared.admin_page(pod, path)).await;
            match page {
                Ok(Ok(Page { status, body })) => (status, body),
                Ok(Err(error)) => (502, format!("{error}\n")),
                Err(error) => (500, format!("{error}\n")),
            }
        }
    };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
    Ok(response)
}

fn pods(shared: &Shared) -> String {
    let view = shared.view();
    let pods: Vec<Pod> = view.active().map(Pod::from).collect();
    serde_json::to_string(&pods).expect("pods serialize to JSON")
}

impl From<&PodView> for Pod {
    fn from(view: &PodView) -> Self {
        let ips = [&view.ip, &view.ipv6].into_iter().flatten();
        Self {
            namespace: view.namespace.clone(),
            name: view.name.clone(),
            workload: view.workload.clone(),
            services: view.services.clone(),
            ips: ips.filter_map(|ip| ip.parse().ok()).collect(),
            injected: view.injected,
            ready: view.ready,
        }
    }
}

/// A question of a client.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Pods,
    AdminPage { pod: (String, String), path: String },
}

impl Asked {
    /// Parses a path with its query.
    fn parse(target: &str) -> Option<Self> {
        let rest = target.strip_prefix("/pods")?;
        if rest.is_empty() {
            return Some(Self::Pods);
        }
        let parts: Vec<&str> = rest.strip_prefix('/')?.splitn(4, '/').collect();
        let &[namespace, name, "admin", page] = &parts[..] else {
            return None;
        };
        let (pod, path) = ((namespace.into(), name.into()), format!("/{page}"));
        Some(Self::AdminPage { pod, path })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A new directory with this mode, and the path of a socket in it.
    fn directory(name: &str, mode: u32) -> (PathBuf, PathBuf) {
        let name = format!("mesh-socket-{name}-{}", std::process::id());
        let directory = env::temp_dir().join(name);
        fs::create_dir(&directory).expect("it is created");
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(&directory, permissions).expect("the mode is set");
        let path = directory.join("demo.sock");
        (directory, path)
    }

    #[test]
    fn parses_targets() {
        assert_eq!(Asked::parse("/pods"), Some(Asked::Pods));
        let pod = ("shop".to_owned(), "web-1".to_owned());
        let path = "/state?destination=a/b".to_owned();
        let page = Asked::parse("/pods/shop/web-1/admin/state?destination=a/b");
        assert_eq!(page, Some(Asked::AdminPage { pod, path }));
        for target in ["/", "/podsx", "/pods/shop/web-1", "/pods/shop/web-1/exec/x"] {
            assert_eq!(Asked::parse(target), None, "{target}");
        }
    }

    #[test]
    fn directory_of_others_is_refused() {
        let (directory, path) = directory("others", 0o700);
        let (own, other) = (geteuid(), Uid::from_raw(geteuid().as_raw() + 1));
        assert!(check_directory(&path, own).is_ok());
        let error = check_directory(&path, other).unwrap_err().to_string();
        let expected = format!("belongs to user {own}, expected a directory with mode 0700");
        assert!(error.contains(&expected), "{error}");
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o770)).expect("it is set");
        let error = bind(&path).unwrap_err().to_string();
        assert!(error.contains("has mode 0770"), "{error}");
        let error = check_directory(&directory.join("no/demo.sock"), own).unwrap_err();
        assert!(matches!(error, Error::NotServed(_)), "{error}");
        fs::remove_dir(directory).expect("it is empty");
    }

    #[test]
    fn symbolic_link_to_a_directory_is_refused() {
        let (directory, _) = directory("link", 0o700);
        let link = directory.join("link");
        unix::fs::symlink(&directory, &link).expect("it is created");
        let error = bind(&link.join("demo.sock")).unwrap_err().to_string();
        assert!(error.contains("is no directory"), "{error}");
        fs::remove_dir_all(directory).expect("it is removed");
    }

    #[tokio::test]
    async fn stale_socket_is_replaced_and_a_served_one_is_not() {
        let (directory, path) = directory("stale", 0o700);
        drop(bind(&path).expect("the first").0);
        let error = connect(&path).await.unwrap_err();
        assert!(matches!(error, Error::NotServed(_)), "{error}");
        let _served = bind(&path).expect("in place of the stale one");
        connect(&path).await.expect("it is served");
        let error = bind(&path).unwrap_err();
        assert!(matches!(error, Error::InUse(_)), "{error}");
        fs::remove_dir_all(directory).expect("it is removed");
    }
}
