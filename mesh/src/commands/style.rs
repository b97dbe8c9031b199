//! How commands that report look: colours on a terminal and nowhere else, times as people say them, tables. Pure but for asking
//! whether there is a terminal.

use std::{
    env,
    io::{self, IsTerminal, Write},
    time::{SystemTime, UNIX_EPOCH},
};

use k8s_openapi::jiff::Timestamp;

/// In what form a command answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people
    #[default]
    Text,
    /// For programs
    Json,
}

/// Colours, or none.
#[derive(Clone, Copy, Debug)]
pub struct Style {
    colour: bool,
}

/// How serious something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// As it should be.
    Good,
    /// To be looked at.
    Doubtful,
    /// Wrong.
    Bad,
    /// Beside the point.
    Faint,
    /// A heading.
    Strong,
}

impl Style {
    /// None at all.
    #[cfg(test)]
    pub const PLAIN: Self = Self { colour: false };

    /// What standard output, or standard error, can show.
    pub fn of(stream: &impl IsTerminal) -> Self {
        Self { colour: stream.is_terminal() && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) }
    }

    /// A text in a tone.
    pub fn paint(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Good => "32",
            Tone::Doubtful => "33",
            Tone::Bad => "31",
            Tone::Faint => "2",
            Tone::Strong => "1",
        };
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Rows below each other, each cell in its tone; the last one of a row is as long as it is.
    pub fn table(self, rows: &[Vec<(Tone, String)>]) -> String {
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|(_, text)| text.chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut table = String::new();
        for row in rows {
            for (column, (tone, text)) in row.iter().enumerate() {
                let last = column + 1 == row.len();
                let padding = if last { 0 } else { widths[column] + 2 - text.chars().count() };
                table += &if *tone == Tone::Faint && text.is_empty() { String::new() } else { self.paint(*tone, text) };
                table += &" ".repeat(padding);
            }
            table.truncate(table.trim_end_matches(' ').len());
            table.push('\n');
        }
        table
    }
}

/// Prints a whole answer. Nobody who reads it any more is no error.
pub fn print(text: &str) -> io::Result<()> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A length of time in its two largest units.
pub fn span(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let Some(first) = UNITS.iter().position(|(length, _)| seconds >= *length) else { return "0 s".into() };
    let (length, unit) = UNITS[first];
    let rest = UNITS.get(first + 1).map(|(small, unit)| (seconds % length / small, unit)).filter(|(count, _)| *count > 0);
    let whole = format!("{} {unit}", seconds / length);
    rest.map_or_else(|| whole.clone(), |(count, unit)| format!("{whole} {count} {unit}"))
}

/// A moment, seen from now: `in 3 h` or `3 h ago`.
pub fn from_now(moment: u64, now: u64) -> String {
    if moment >= now { format!("in {}", span(moment - now)) } else { format!("{} ago", span(now - moment)) }
}

/// A moment as everybody writes it, in UTC.
pub fn stamp(moment: u64) -> String {
    i64::try_from(moment).ok().and_then(|seconds| Timestamp::from_second(seconds).ok()).map_or_else(|| "?".into(), |time| time.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_two_units() {
        let told = [0, 5, 60, 61, 3_600, 3_661, 86_400 * 3 + 7_300].map(span);
        assert_eq!(told, ["0 s", "5 s", "1 min", "1 min 1 s", "1 h", "1 h 1 min", "3 d 2 h"]);
        assert_eq!((from_now(100, 40), from_now(40, 100)), ("in 1 min".into(), "1 min ago".into()));
        assert_eq!(stamp(0), "1970-01-01T00:00:00Z");
    }

    #[test]
    fn cells_stand_below_each_other() {
        let row = |cells: [&str; 3]| cells.map(|cell| (Tone::Good, cell.to_owned())).to_vec();
        assert_eq!(Style::PLAIN.table(&[row(["a", "bb", "c"]), row(["long", "é", ""])]), "a     bb  c\nlong  é\n");
    }
}
