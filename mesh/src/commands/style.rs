//! How commands that report look: colours on a terminal and nowhere else, and tables. Pure but for asking whether
//! there is a terminal.

use std::{
    env,
    io::{self, IsTerminal, Write},
};

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
        Self {
            colour: stream.is_terminal()
                && env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
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
        if self.colour {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    /// Rows below each other, each cell in its tone; the last one of a row is as long as it is.
    pub fn table(self, rows: &[Vec<(Tone, String)>]) -> String {
        let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            rows.iter()
                .filter_map(|row| row.get(column))
                .map(|(_, text)| text.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut table = String::new();
        for row in rows {
            for (column, (tone, text)) in row.iter().enumerate() {
                let last = column + 1 == row.len();
                let padding = if last {
                    0
                } else {
                    widths[column] + 2 - text.chars().count()
                };
                table += &if *tone == Tone::Faint && text.is_empty() {
                    String::new()
                } else {
                    self.paint(*tone, text)
                };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_stand_below_each_other() {
        let row = |cells: [&str; 3]| cells.map(|cell| (Tone::Good, cell.to_owned())).to_vec();
        assert_eq!(
            Style::PLAIN.table(&[row(["a", "bb", "c"]), row(["long", "é", ""])]),
            "a     bb  c\nlong  é\n"
        );
    }
}
