//! Start of the node from the client: checks the prerequisites, starts `mesh sandbox-node`, and
//! writes the id maps of its user namespace if the client is not root.

use std::{
    env, fs,
    io::{self, BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use nix::unistd::{User, geteuid, getgid, getuid};

use super::protocol::Message;

/// Why the sandbox does not start.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// Missing prerequisites.
    #[error("the sandbox cannot start here:\n  {}", .0.join("\n  "))]
    Missing(Vec<String>),
    /// A system call or program failed.
    #[error("cannot start the sandbox: {0}")]
    Io(#[from] io::Error),
    /// The node failed.
    #[error("cannot start the sandbox: {0}")]
    Failed(String),
}

/// A started node.
pub(super) struct Launched {
    pub(super) child: Child,
    pub(super) writer: UnixStream,
    pub(super) reader: BufReader<UnixStream>,
}

/// Starts the node. `programs` is the directory of the binaries.
pub(super) fn launch(programs: &Path) -> Result<Launched, LaunchError> {
    let missing = missing_prerequisites(programs);
    if !missing.is_empty() {
        return Err(LaunchError::Missing(missing));
    }
    let (mut control, node_control) = UnixStream::pair()?;
    let mut child = Command::new(programs.join("mesh"))
        .arg("sandbox-node")
        .arg(programs)
        .env("PATH", search_path())
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(node_control)))
        .stdout(Stdio::null())
        .spawn()?;
    let mut reader = BufReader::new(control.try_clone()?);
    if let Err(error) = wait_until_started(&mut reader, &mut control) {
        child.kill()?;
        let status = child.wait()?;
        return Err(match error {
            LaunchError::Io(_) => {
                LaunchError::Failed(format!("the process exited during startup ({status})"))
            }
            other => other,
        });
    }
    Ok(Launched {
        child,
        writer: control,
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

fn missing_prerequisites(programs: &Path) -> Vec<String> {
    let mut missing = Vec::new();
    let mut require = |program: &str, package: &str| {
        if find(program).is_none() {
            missing.push(format!(
                "program {program} not found: on Debian and Ubuntu, run `apt-get install {package}`"
            ));
        }
    };
    if !geteuid().is_root() {
        require("newuidmap", "uidmap");
        require("newgidmap", "uidmap");
        let ids = IdMap::both();
        missing.extend(
            ids.iter()
                .filter_map(|ids| ids.first_subordinate_id().err()),
        );
    }
    // `cargo install` installs `mesh` alone.
    for program in ["mesh", "proxy"] {
        if !programs.join(program).is_file() {
            missing.push(format!(
                "program {program} not found in {}: run `make demo` or `cargo build --bins` in a checkout of the sources, or install a release",
                programs.display()
            ));
        }
    }
    missing
}

/// PATH and the sbin directories, which the PATH of an unprivileged user may lack.
pub(super) fn search_path() -> std::ffi::OsString {
    let given = env::var_os("PATH").unwrap_or_default();
    let directories = env::split_paths(&given)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from));
    env::join_paths(directories).unwrap_or(given)
}

fn find(program: &str) -> Option<PathBuf> {
    env::split_paths(&search_path())
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

fn map_ids(pid: i32) -> Result<(), LaunchError> {
    for ids in IdMap::both() {
        let first = ids
            .first_subordinate_id()
            .map_err(|reason| LaunchError::Missing(vec![reason]))?;
        let arguments = format!("{pid} 0 {} 1 1 {first} {ID_COUNT}", ids.own);
        let output = Command::new(ids.tool)
            .args(arguments.split(' '))
            .env("PATH", search_path())
            .output()?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let (tool, reason) = (ids.tool, stderr.trim());
            return Err(LaunchError::Failed(format!(
                "{tool} {arguments} failed: {reason}"
            )));
        }
    }
    Ok(())
}

/// The map of user or group ids of a user namespace.
struct IdMap {
    own: u32,
    tool: &'static str,
    file: &'static str,
}

/// The number of mapped subordinate ids. Containers use ids up to 65,532.
const ID_COUNT: u32 = 65_535;

impl IdMap {
    fn both() -> [Self; 2] {
        let users = (getuid().as_raw(), "newuidmap", "/etc/subuid");
        let groups = (getgid().as_raw(), "newgidmap", "/etc/subgid");
        [users, groups].map(|(own, tool, file)| Self { own, tool, file })
    }

    /// The first id of the subordinate range of the user.
    fn first_subordinate_id(&self) -> Result<u32, String> {
        let user = User::from_uid(getuid()).ok().flatten();
        let name = user.map(|user| user.name).unwrap_or_default();
        let text = fs::read_to_string(self.file).unwrap_or_default();
        subordinate_range(&text, &name, getuid().as_raw()).ok_or_else(|| {
            format!(
                "{} has no range of {ID_COUNT} ids for {name}: run as root, or run `usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name}` as root",
                self.file
            )
        })
    }
}

/// The start of the first range of at least `ID_COUNT` ids that /etc/subuid or /etc/subgid assigns
/// to the user.
fn subordinate_range(text: &str, name: &str, uid: u32) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (owner, first, count) = (
            fields.next()?,
            fields.next()?.parse().ok()?,
            fields.next()?.parse::<u32>().ok()?,
        );
        ((owner == name || owner == uid.to_string()) && count >= ID_COUNT).then_some(first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selects_a_large_enough_range_of_the_user() {
        let text = "other:1000:65536\nme:5000:10\nme:100000:65536\n";
        assert_eq!(subordinate_range(text, "me", 7), Some(100_000));
        assert_eq!(subordinate_range("7:9:70000", "me", 7), Some(9));
        assert_eq!(subordinate_range("broken\nme:x:y", "me", 7), None);
    }
}
