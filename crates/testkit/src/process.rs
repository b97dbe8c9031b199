//! A program as a process, with its output; killed at the end of the test.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

pub use nix::sys::signal::Signal;
use nix::sys::signal::kill;
use nix::unistd::Pid;

use crate::wait::{eventually, eventually_blocking};

/// A process. Its output is printed if the test fails.
pub struct Process {
    child: Child,
    output: Arc<Mutex<String>>,
    /// The length of the output up to the last line that [`Self::line`] has returned.
    read: usize,
}

impl Process {
    /// Starts a program. Standard output and standard error are read as one text.
    pub fn start(command: &mut Command) -> Self {
        let mut process = Self::with_stdout(command.stderr(Stdio::piped()));
        read_lines(&process.output, process.child.stderr.take().unwrap());
        process
    }

    /// Starts a program whose standard output is read. It shares the standard error of the test.
    pub fn with_stdout(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).spawn();
        let mut child = child.expect("the program starts");
        let output = Arc::default();
        read_lines(&output, child.stdout.take().unwrap());
        Self {
            child,
            output,
            read: 0,
        }
    }

    /// The process ID.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The output so far.
    pub fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    /// Waits until the output contains `expected`; returns the output up to the end of that line. Fails
    /// at once if the output ends before.
    pub fn wait_for(&self, expected: &str) -> String {
        eventually_blocking(expected, || {
            let is_closed = is_closed(&self.output);
            let text = self.output();
            let found = text.find(expected).and_then(|at| {
                let last = at + expected.len() - 1;
                Some(text[..=last + text[last..].find('\n')?].to_owned())
            });
            assert!(found.is_some() || !is_closed, "no {expected:?} in {text}");
            found.ok_or(text)
        })
    }

    /// All lines, until the program closes its output. Waits for each one.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let mut read = 0;
        std::iter::from_fn(move || {
            eventually_blocking("the next line", || {
                let is_closed = is_closed(&self.output);
                let output = self.output.lock().unwrap();
                let line = output[read..].lines().next();
                read += line.map_or(0, |line| line.len() + 1);
                match line {
                    None if !is_closed => Err("the program runs"),
                    line => Ok(line.map(str::to_owned)),
                }
            })
        })
    }

    /// Waits for the next line with this text. The tasks of the runtime run meanwhile. Fails at once if
    /// the output ends before.
    pub async fn line(&mut self, text: &str) -> String {
        let (output, read) = (&self.output, &mut self.read);
        eventually(text, async || {
            let is_closed = is_closed(output);
            // A copy: a failure under the lock would poison it for the drop of the process.
            let output = output.lock().unwrap().clone();
            for line in output[*read..].split_inclusive('\n') {
                *read += line.len();
                if line.contains(text) {
                    return Ok(line.trim_end().to_owned());
                }
            }
            assert!(!is_closed, "no line with {text:?} in {output}");
            Err(output)
        })
        .await
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let id = Pid::from_raw(self.id().cast_signed());
        kill(id, signal).expect("the process exists");
    }

    /// Whether the process has exited.
    pub fn has_exited(&mut self) -> bool {
        self.try_exit().is_ok()
    }

    /// Waits for the process to exit.
    pub fn exit(&mut self) -> ExitStatus {
        eventually_blocking("the process exits", || self.try_exit())
    }

    /// Like [`Self::exit`], while the tasks of the runtime run.
    pub async fn exited(&mut self) -> ExitStatus {
        eventually("the process exits", async || self.try_exit()).await
    }

    fn try_exit(&mut self) -> Result<ExitStatus, &'static str> {
        self.child.try_wait().unwrap().ok_or("it runs")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            println!("{}", self.output.lock().unwrap());
        }
    }
}

/// Whether the program has closed its output, all of which was read.
fn is_closed(output: &Arc<Mutex<String>>) -> bool {
    Arc::strong_count(output) == 1
}

fn read_lines(output: &Arc<Mutex<String>>, pipe: impl Read + Send + 'static) {
    let output = output.clone();
    std::thread::spawn(move || {
        let (mut lines, mut line) = (BufReader::new(pipe), String::new());
        while lines.read_line(&mut line).is_ok_and(|read| read > 0) {
            output.lock().unwrap().push_str(&line);
            line.clear();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_fails_with_the_output_when_the_program_ends() {
        let process = Process::start(Command::new("sh").args(["-c", "echo invalid option >&2"]));
        let wait = std::panic::AssertUnwindSafe(|| process.wait_for("ready"));
        let failure = std::panic::catch_unwind(wait).unwrap_err();
        let message = failure.downcast_ref::<String>().unwrap();
        assert_eq!(message, "no \"ready\" in invalid option\n");
    }

    #[tokio::test]
    #[should_panic(expected = "no line with \"ready\" in invalid option\n")]
    async fn line_fails_with_the_output_when_the_program_ends() {
        let mut process =
            Process::start(Command::new("sh").args(["-c", "echo invalid option >&2"]));
        process.line("ready").await;
    }

    #[tokio::test]
    async fn line_before_the_end_is_found() {
        let mut process = Process::start(Command::new("sh").args(["-c", "echo one; echo two"]));
        assert_eq!(process.line("two").await, "two");
    }
}
