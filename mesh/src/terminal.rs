//! Terminal output of the commands: formats, colors and tables. All output passes this module, which
//! alone writes control characters: proxies, tenants and clients write what commands print.

use std::{
    env,
    io::{self, IsTerminal, Write},
};

use anyhow::{Context, Result};
use diy_mesh_model::escape;
use serde::Serialize;
use serde_json::json;

const START_OF_COLOR: &str = "\x1b[";
/// The end of a style, bold, dim, and the foreground colors.
const COLORS: [u8; 10] = [0, 1, 2, 31, 32, 33, 34, 35, 36, 37];

/// The output format of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// Text
    #[default]
    Text,
    /// JSON
    Json,
}

impl Output {
    /// Prints a value as JSON, or as a text.
    pub fn print(self, value: &impl Serialize, text: impl FnOnce(Colors) -> String) -> Result<()> {
        print(&match self {
            Self::Text => text(Colors::of(&io::stdout())),
            Self::Json => json(&format!("{:#}", json!(value))),
        })
    }
}

/// Whether output is colored.
#[derive(Clone, Copy, Debug)]
pub struct Colors {
    enabled: bool,
}

/// The style of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextStyle {
    Ok,
    Warning,
    Error,
    Dim,
    Bold,
}

/// A cell of a table.
pub type Cell = (TextStyle, String);

impl TextStyle {
    /// A cell in this style.
    pub fn cell(self, text: impl Into<String>) -> Cell {
        (self, text.into())
    }
}

/// A cell in the style of most cells.
pub fn plain(text: impl Into<String>) -> Cell {
    TextStyle::Ok.cell(text)
}

/// The first row of a table.
pub fn headings<const N: usize>(texts: [&str; N]) -> Vec<Cell> {
    texts.map(|text| TextStyle::Bold.cell(text)).to_vec()
}

/// Rows with these details. Only the first row has the heads.
pub fn headed<const N: usize>(heads: [Cell; N], details: Vec<Vec<Cell>>) -> Vec<Vec<Cell>> {
    let mut heads = Some(heads);
    let rows = details.into_iter().map(|detail| {
        let heads = heads.take().unwrap_or([(); N].map(|()| plain("")));
        heads.into_iter().chain(detail).collect()
    });
    rows.collect()
}

impl Colors {
    #[cfg(test)]
    pub const DISABLED: Self = Self { enabled: false };

    /// Enables colors if the stream is a terminal and NO_COLOR is not set.
    pub fn of(stream: &impl IsTerminal) -> Self {
        let disabled = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            enabled: stream.is_terminal() && !disabled,
        }
    }

    /// Formats a text in a style.
    pub fn paint(self, style: TextStyle, text: &str) -> String {
        let code = match style {
            TextStyle::Ok => 32,
            TextStyle::Warning => 33,
            TextStyle::Error => 31,
            TextStyle::Dim => 2,
            TextStyle::Bold => 1,
        };
        self.paint_code(code, text)
    }

    /// Formats a text with an ANSI SGR code.
    pub fn paint_code(self, code: u8, text: &str) -> String {
        if self.enabled {
            format!("{START_OF_COLOR}{code}m{text}{START_OF_COLOR}0m")
        } else {
            text.to_owned()
        }
    }

    /// The text without control characters, but for line ends, tabs and the colors of
    /// [`Self::paint_code`].
    fn displayed(self, text: &str) -> String {
        let mut displayed = String::with_capacity(text.len());
        let mut parts = text.split(START_OF_COLOR);
        escape::text(parts.next().unwrap_or_default(), &mut displayed);
        for part in parts {
            let code = part.split_once('m').and_then(|(code, rest)| {
                let is_color = COLORS.contains(&code.parse().ok()?);
                (self.enabled && is_color).then_some((code, rest))
            });
            let rest = match code {
                Some((code, rest)) => {
                    displayed += &format!("{START_OF_COLOR}{code}m");
                    rest
                }
                None => {
                    escape::text(START_OF_COLOR, &mut displayed);
                    part
                }
            };
            escape::text(rest, &mut displayed);
        }
        displayed
    }

    /// Formats rows of cells as a table with aligned columns.
    pub fn table(self, rows: &[Vec<Cell>]) -> String {
        let cell = |(style, text): &Cell| style.cell(printable(text));
        let cells = |row: &Vec<Cell>| -> Vec<Cell> { row.iter().map(cell).collect() };
        let rows: Vec<_> = rows.iter().map(cells).collect();
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
        for row in &rows {
            for (column, (style, text)) in row.iter().enumerate() {
                let is_last = column + 1 == row.len();
                let padding = if is_last {
                    0
                } else {
                    widths[column] + 2 - text.chars().count()
                };
                table += &if *style == TextStyle::Dim && text.is_empty() {
                    String::new()
                } else {
                    self.paint(*style, text)
                };
                table += &" ".repeat(padding);
            }
            table.truncate(table.trim_end_matches(' ').len());
            table.push('\n');
        }
        table
    }
}

/// The text without characters that control the terminal or add lines: clients and tenants write
/// it.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    escape::line(text.as_bytes(), &mut printable);
    printable
}

/// A line of JSON, or several, for standard output.
pub fn json(json: &str) -> String {
    escape::json(json) + "\n"
}

/// Prints a text to standard output. Ignores a closed pipe.
pub fn print(text: &str) -> Result<()> {
    match write(text) {
        Err(error) if is_closed(&error) => Ok(()),
        other => other,
    }
}

/// Prints a text to standard output.
pub fn write(text: &str) -> Result<()> {
    let mut output = io::stdout().lock();
    let text = Colors::of(&output).displayed(text);
    let written = output.write_all(text.as_bytes());
    written.context("failed to write to standard output")
}

/// Prints a note to standard error.
pub fn note(text: &str) {
    let mut output = io::stderr().lock();
    let text = Colors::of(&output).displayed(text.trim_end());
    // Nobody reads the note if this fails.
    let _ = writeln!(output, "{}", text.replace('\n', "\n  "));
}

/// Whether [`write`] failed because the reader of standard output has exited.
pub fn is_closed(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<io::Error>();
    error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligns_table_columns() {
        let row = |cells: [&str; 3]| cells.map(|cell| (TextStyle::Ok, cell.to_owned())).to_vec();
        assert_eq!(
            Colors::DISABLED.table(&[row(["a", "bb", "c"]), row(["long", "é", ""])]),
            "a     bb  c\nlong  é\n"
        );
    }

    #[test]
    fn output_controls_the_terminal_by_colors_only() {
        let colors = Colors { enabled: true };
        let red = colors.paint(TextStyle::Error, "a");
        let text = format!("{red}\tb\x1b[2J\x1b[8mc\x1b]0;t\x07\u{9b}\u{202e}\x1b\n\x1b[");
        assert_eq!(
            colors.displayed(&text),
            format!("{red}\tb\\x1b[2J\\x1b[8mc\\x1b]0;t\\x07\\u{{9b}}\\u{{202e}}\\x1b\n\\x1b[")
        );
        assert_eq!(Colors::DISABLED.displayed("\x1b[31ma"), "\\x1b[31ma");
    }

    #[test]
    fn values_add_no_lines_and_control_no_terminal() {
        let cell = (TextStyle::Ok, "a\nproblem: none\x1b[2J\u{9b}1m".to_owned());
        let table = Colors::DISABLED.table(&[vec![cell]]);
        assert_eq!(table, "a\\nproblem: none\\x1b[2J\\u{9b}1m\n");
    }
}
