//! The screen of `mesh top`: what keys do, and what is drawn. Without a terminal of its own.

use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::{Constraint, Layout, Rect},
    style::{Color, Style, Stylize as _},
    text::Line as TextLine,
    widgets::{Paragraph, Row, Table, TableState, Wrap},
};

use super::super::stat::{RATES, TCP, tcp_texts, texts};
use super::model::{Line, Model};
use crate::terminal::printable;
use crate::traffic::{By, TcpRow};

/// The width of a value, and of the bars.
const VALUE_WIDTH: u16 = 9;
const BARS_WIDTH: u16 = 30;
/// The width of a value of opaque connections.
const TCP_WIDTH: u16 = 13;
const HELP: &str = "up/down select   Enter latest failure   q quit";
const PAGE_HELP: &str = "up/down scroll   Esc back";

/// The content of the screen.
pub struct Screen {
    pub by: By,
    pub model: Model,
    /// Notes about missing or sampled data.
    pub notes: Vec<String>,
    /// The opaque connections of the latest sample.
    pub tcp: Vec<TcpRow>,
    /// The names of the selected row.
    selected: Option<Vec<String>>,
    /// The page that covers the table, and its first line.
    page: Option<(String, u16)>,
}

/// The action that a key asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked {
    Nothing,
    End,
    /// The latest failure of the row with these names.
    Why(Vec<String>),
}

impl Screen {
    pub fn new(by: By) -> Self {
        Self {
            by,
            model: Model::default(),
            notes: Vec::new(),
            tcp: Vec::new(),
            selected: None,
            page: None,
        }
    }

    /// Shows a page, if the user still waits for one.
    pub fn show(&mut self, text: String) {
        if self.page.is_some() {
            self.page = Some((text, 0));
        }
    }

    pub fn press(&mut self, key: KeyEvent) -> Asked {
        let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
        match (key.code, &mut self.page) {
            (KeyCode::Char('c'), _) if is_control => return Asked::End,
            (KeyCode::Esc | KeyCode::Char('q') | KeyCode::Enter, page @ Some(_)) => *page = None,
            (KeyCode::Esc | KeyCode::Char('q'), None) => return Asked::End,
            (KeyCode::Down, Some((_, first))) => *first = first.saturating_add(1),
            (KeyCode::Up, Some((_, first))) => *first = first.saturating_sub(1),
            (KeyCode::Down, None) => self.select(|selected| selected + 1),
            (KeyCode::Up, None) => self.select(|selected| selected.saturating_sub(1)),
            (KeyCode::Enter, None) => {
                let selected = self.selected_position();
                if let Some(line) = self.model.lines().get(selected) {
                    let names = line.names.clone();
                    self.page = Some(("asking the proxies...".to_owned(), 0));
                    return Asked::Why(names);
                }
            }
            _ => {}
        }
        Asked::Nothing
    }

    /// The selection stays at its row when that moves. At first, it is the worst one.
    fn selected_position(&self) -> usize {
        let selected = self.selected.as_ref();
        let mut lines = self.model.lines().iter();
        let found = selected.and_then(|names| lines.position(|line| line.names == *names));
        found.unwrap_or(0)
    }

    fn select(&mut self, move_by: impl Fn(usize) -> usize) {
        let last = self.model.lines().len().saturating_sub(1);
        let position = move_by(self.selected_position()).min(last);
        let line = self.model.lines().get(position);
        self.selected = line.map(|line| line.names.clone());
    }

    pub fn draw(&self, frame: &mut Frame<'_>) {
        let notes = u16::try_from(self.notes.len()).unwrap_or(u16::MAX).min(3);
        let heights = [
            Constraint::Length(1),
            Constraint::Min(1),
            Constraint::Length(notes),
            Constraint::Length(1),
        ];
        let [head, body, note_area, foot] = Layout::vertical(heights).areas(frame.area());
        let banner = self.model.banner();
        let banner = banner.map(|text| TextLine::from(printable(&text)).white().on_red());
        frame.render_widget(banner.unwrap_or_else(|| "mesh top".bold().into()), head);
        match &self.page {
            Some((text, first)) => {
                let page = Paragraph::new(text.as_str()).wrap(Wrap { trim: false });
                frame.render_widget(page.scroll((*first, 0)), body);
            }
            None => {
                let selected = self.selected_position();
                let mut state = TableState::new().with_selected(selected);
                let [requests, tcp] = self.areas(body);
                frame.render_stateful_widget(self.table(), requests, &mut state);
                if !self.tcp.is_empty() {
                    frame.render_widget(self.tcp_table(), tcp);
                }
            }
        }
        let notes: Vec<_> = self.notes.iter().map(|note| printable(note)).collect();
        let notes = Paragraph::new(notes.join("\n")).style(Color::Yellow);
        frame.render_widget(notes, note_area);
        let help = if self.page.is_some() { PAGE_HELP } else { HELP };
        frame.render_widget(help.dim(), foot);
    }

    /// The areas of requests and of opaque connections, which get at most a third.
    fn areas(&self, body: Rect) -> [Rect; 2] {
        let lines = u16::try_from(self.tcp.len()).unwrap_or(u16::MAX);
        let lines = lines.saturating_add(u16::from(lines > 0));
        let tcp = Constraint::Length(lines.min(body.height / 3));
        Layout::vertical([Constraint::Min(1), tcp]).areas(body)
    }

    /// The table of opaque connections, first the rows without mutual TLS.
    fn tcp_table(&self) -> Table<'_> {
        let mut rows: Vec<&TcpRow> = self.tcp.iter().collect();
        rows.sort_by(|one, other| {
            let [one, other] = [one, other].map(|row| row.connections.mutual_tls);
            one.total_cmp(&other)
        });
        let rows = rows.into_iter().map(|row| {
            let names = row.names.values().map(|name| printable(name));
            let color = if row.connections.mutual_tls < 1.0 {
                Color::Yellow
            } else {
                Color::Reset
            };
            Row::new(names.chain(tcp_texts(&row.connections))).style(color)
        });
        let names = self.by.headings();
        let widths = names.iter().map(|_| Constraint::Fill(1));
        let widths = widths.chain(TCP.map(|_| Constraint::Length(TCP_WIDTH)));
        let headings = names.iter().copied().chain(TCP);
        Table::new(rows, widths).header(Row::new(headings).bold())
    }

    fn table(&self) -> Table<'_> {
        let names = self.by.headings();
        let headings = names.iter().copied().chain(RATES).chain(["REQUESTS"]);
        let name_widths = names.iter().map(|_| Constraint::Fill(1));
        let widths = name_widths
            .chain(RATES.map(|_| Constraint::Length(VALUE_WIDTH)))
            .chain([Constraint::Length(BARS_WIDTH)]);
        let rows = self.model.lines().iter().map(row);
        Table::new(rows, widths)
            .header(Row::new(headings).bold())
            .row_highlight_style(Style::new().reversed())
    }
}

fn row(line: &Line) -> Row<'static> {
    let names = line.names.iter().map(|name| printable(name));
    let cells = names
        .chain(texts(&line.rates))
        .chain([line.bars(BARS_WIDTH.into())]);
    let color = match line.rates.success {
        _ if line.is_idle() => Color::DarkGray,
        1.0.. => Color::Reset,
        0.99.. => Color::Yellow,
        _ => Color::Red,
    };
    Row::new(cells).style(color)
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::traffic::{Connections, Rates};

    fn screen() -> Screen {
        let rates = |success| Rates {
            requests_per_second: 12.0,
            success,
            mutual_tls: 1.0,
            p50_ms: 1.0,
            p95_ms: 2.0,
            p99_ms: 3.0,
        };
        let edge = |to: &str, success| (vec!["shop/web".to_owned(), to.to_owned()], rates(success));
        let mut screen = Screen::new(By::Edge);
        screen
            .model
            .update(vec![edge("shop/pay\x1b", 1.0), edge("shop/cart", 0.5)]);
        screen
    }

    fn drawn(screen: &Screen) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(130, 7)).expect("in memory");
        terminal
            .draw(|frame| screen.draw(frame))
            .expect("in memory");
        let buffer = terminal.backend().buffer();
        let lines = buffer.content().chunks(130);
        let text = |line: &[ratatui::buffer::Cell]| {
            let text: String = line.iter().map(|cell| cell.symbol()).collect();
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        lines.map(text).collect()
    }

    #[test]
    fn draws_the_rows_their_rates_and_the_notes() {
        let mut screen = screen();
        screen.notes = vec!["2 of 9 proxies were asked".into()];
        assert_eq!(
            drawn(&screen),
            [
                "mesh top",
                "FROM TO RPS SUCCESS P50 P95 P99 MTLS REQUESTS",
                "shop/web shop/cart 12.0 50.00% 1.0 ms 2.0 ms 3.0 ms 100.00% █",
                "shop/web shop/pay\\x1b 12.0 100.00% 1.0 ms 2.0 ms 3.0 ms 100.00% █",
                "",
                "2 of 9 proxies were asked",
                HELP_DRAWN,
            ]
        );
    }

    #[test]
    fn draws_opaque_connections_below_requests_and_those_without_mutual_tls_first() {
        let mut screen = screen();
        let row = |to: &str, mutual_tls| TcpRow {
            names: [("from", "shop/web".to_owned()), ("to", to.to_owned())].into(),
            connections: Connections {
                open: 1,
                connections: 2,
                mutual_tls,
                sent_bytes_per_second: 3000.0,
                received_bytes_per_second: 100.0,
            },
        };
        screen.tcp = vec![row("shop/redis", 1.0), row("shop/mqtt", 0.0)];
        let mut terminal = Terminal::new(TestBackend::new(130, 12)).expect("in memory");
        terminal
            .draw(|frame| screen.draw(frame))
            .expect("in memory");
        let text = format!("{:?}", terminal.backend());
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
        let lines = [
            "shop/web shop/cart 12.0",
            "FROM TO TCP OPEN SENT KB/S RECEIVED KB/S MTLS",
            "shop/web shop/mqtt 2 1 3.0 0.1 0.00%",
            "shop/web shop/redis 2 1 3.0 0.1 100.00%",
        ];
        assert!(lines.map(at).is_sorted(), "{text}");
    }

    const HELP_DRAWN: &str = "up/down select Enter latest failure q quit";

    #[test]
    fn keys_select_a_row_show_its_failure_and_end() {
        let mut screen = screen();
        let mut press = |code| screen.press(KeyEvent::from(code));
        let names = |to: &str| Asked::Why(vec!["shop/web".into(), to.into()]);
        // A page that nobody waits for is not shown.
        assert_eq!(press(KeyCode::Enter), names("shop/cart"));
        assert_eq!(press(KeyCode::Esc), Asked::Nothing);
        for _ in 0..3 {
            assert_eq!(press(KeyCode::Down), Asked::Nothing);
        }
        assert_eq!(press(KeyCode::Enter), names("shop/pay\x1b"));
        assert_eq!(press(KeyCode::Char('q')), Asked::Nothing);
        assert_eq!(press(KeyCode::Up), Asked::Nothing);
        assert_eq!(press(KeyCode::Enter), names("shop/cart"));
        assert_eq!(press(KeyCode::Enter), Asked::Nothing);
        assert_eq!(press(KeyCode::Char('q')), Asked::End);
        let control = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.press(control), Asked::End);
        screen.show("too late".into());
        assert!(!drawn(&screen).concat().contains("too late"));
        screen.press(KeyEvent::from(KeyCode::Enter));
        screen.show("Why: no-endpoint\nmore".into());
        assert_eq!(drawn(&screen)[1..3], ["Why: no-endpoint", "more"]);
        screen.press(KeyEvent::from(KeyCode::Down));
        assert_eq!(drawn(&screen)[1], "more");
    }
}
