//! The outer half's way in: says what is missing on this machine, starts the inner half, and writes the id maps of its user
//! namespace where there is no root. It changes nothing outside of the processes that it starts.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    os::unix::{net::UnixStream, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use nix::unistd::{User, getegid, geteuid, getgid, getuid};

use super::protocol::Message;

/// Why there is no sandbox.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Things that the machine lacks, all of them.
    #[error("the sandbox cannot start here:\n  {}", .0.join("\n  "))]
    Missing(Vec<String>),
    /// A system call or program that failed on the way.
    #[error("cannot start the sandbox: {0}")]
    Io(#[from] io::Error),
    /// What the inner half said.
    #[error("cannot start the sandbox: {0}")]
    Failed(String),
}

/// The inner half, up and ready for requests.
pub(super) struct Launched {
    pub(super) child: Child,
    pub(super) writer: UnixStream,
    pub(super) reader: BufReader<UnixStream>,
}

/// Starts the inner half; `programs` is the folder with `mesh`, `proxy` and the others.
pub(super) fn launch(programs: &Path) -> Result<Launched, LaunchError> {
    let missing = missing(programs);
    if !missing.is_empty() {
        return Err(LaunchError::Missing(missing));
    }
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut child = Command::new(programs.join("mesh"))
        .arg("sandbox-node")
        .arg("--programs")
        .arg(programs)
        .env("PATH", search_path())
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .spawn()?;
    let mut reader = BufReader::new(ours.try_clone()?);
    let started = wait_until_started(&mut reader, &mut ours);
    if let Err(error) = started {
        // It ends by itself when the socket closes; not waiting for long matters more than a tidy end.
        child.kill()?;
        let status = child.wait()?;
        return Err(match error {
            LaunchError::Io(_) => LaunchError::Failed(format!(
                "it ended at once ({status}, signal {:?})",
                status.signal()
            )),
            other => other,
        });
    }
    Ok(Launched {
        child,
        writer: ours,
        reader,
    })
}

fn wait_until_started(
    reader: &mut impl BufRead,
    writer: &mut impl Write,
) -> Result<(), LaunchError> {
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        match serde_json::from_str(&line).map_err(io::Error::from)? {
            Message::Started => return Ok(()),
            Message::Failed { reason } => return Err(LaunchError::Failed(reason)),
            Message::MapIds { pid } => {
                map_ids(pid)?;
                writer.write_all(b"\n")?;
            }
            _ => {}
        }
    }
}

fn missing(programs: &Path) -> Vec<String> {
    let mut missing = Vec::new();
    let mut need = |program: &str, package: &str| {
        if find(program).is_none() {
            missing.push(format!("the program {program} is missing: on Debian and Ubuntu, `apt-get install {package}`"));
        }
    };
    need("ip", "iproute2");
    need("iptables-restore", "iptables");
    if !geteuid().is_root() {
        need("newuidmap", "uidmap");
        need("newgidmap", "uidmap");
        missing.extend(
            [Ids::users(), Ids::groups()]
                .iter()
                .filter_map(|ids| ids.range().err()),
        );
    }
    if !programs.join("mesh").is_file() {
        missing.push(format!(
            "no program mesh in {}: `cargo build --bins`",
            programs.display()
        ));
    }
    missing
}

/// PATH, and the folders of administrators' programs, which an ordinary user's PATH may lack.
pub(super) fn search_path() -> std::ffi::OsString {
    let given = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&given)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from));
    env::join_paths(folders).unwrap_or(given)
}

fn find(program: &str) -> Option<PathBuf> {
    env::split_paths(&search_path())
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
}

fn map_ids(pid: i32) -> Result<(), LaunchError> {
    for ids in [Ids::users(), Ids::groups()] {
        let (first, count) = ids
            .range()
            .map_err(|reason| LaunchError::Missing(vec![reason]))?;
        let arguments = [
            pid.to_string(),
            "0".into(),
            ids.own.to_string(),
            "1".into(),
            "1".into(),
            first.to_string(),
            count.to_string(),
        ];
        let output = Command::new(ids.tool)
            .args(&arguments)
            .env("PATH", search_path())
            .output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(LaunchError::Failed(format!(
                "{} {}: {}",
                ids.tool,
                arguments.join(" "),
                said.trim()
            )));
        }
    }
    Ok(())
}

/// One of the two kinds of ids that a user namespace maps.
struct Ids {
    own: u32,
    tool: &'static str,
    file: &'static str,
}

/// Containers use ids up to 65,532.
const IDS: u32 = 65_535;

impl Ids {
    fn users() -> Self {
        debug_assert_eq!(getuid(), geteuid());
        Self {
            own: getuid().as_raw(),
            tool: "newuidmap",
            file: "/etc/subuid",
        }
    }

    fn groups() -> Self {
        debug_assert_eq!(getgid(), getegid());
        Self {
            own: getgid().as_raw(),
            tool: "newgidmap",
            file: "/etc/subgid",
        }
    }

    /// The first id of a range that belongs to this user, and how many of it we map.
    fn range(&self) -> Result<(u32, u32), String> {
        let name = User::from_uid(getuid())
            .ok()
            .flatten()
            .map(|user| user.name)
            .unwrap_or_default();
        let text = fs::read_to_string(self.file).unwrap_or_default();
        subordinate_range(&text, &name, getuid().as_raw()).ok_or_else(|| {
            format!(
                "{} gives {name} no range of {IDS} ids: as root, `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name}`, or run as root",
                self.file
            )
        })
    }
}

/// The first range in the text of /etc/subuid that is the user's and long enough.
fn subordinate_range(text: &str, name: &str, uid: u32) -> Option<(u32, u32)> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (owner, first, count) = (
            fields.next()?,
            fields.next()?.parse().ok()?,
            fields.next()?.parse::<u32>().ok()?,
        );
        ((owner == name || owner == uid.to_string()) && count >= IDS).then_some((first, IDS))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_is_the_users_own_and_long_enough() {
        let text = "other:1000:65536\nme:5000:10\nme:100000:65536\n";
        assert_eq!(subordinate_range(text, "me", 7), Some((100_000, IDS)));
        assert_eq!(subordinate_range("7:9:70000", "me", 7), Some((9, IDS)));
        assert_eq!(subordinate_range("broken\nme:x:y", "me", 7), None);
    }
}
