//! What the screen shows and how keys change it; knows nothing of terminals but their key codes.

use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::table::{Column, Sorting};
use super::watcher::Line;

/// Rows that a page key moves by.
const PAGE_ROWS: usize = 10;

/// What a key asks of the loop around the screen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Nothing but to be drawn anew.
    Draw,
    /// To ask the backends at once.
    Ask,
    /// To end.
    Quit,
}

/// Keys and what they do, for the help.
pub const KEYS: [(&str, &str); 11] = [
    ("q, Esc, Ctrl-C", "quit"),
    ("?, h", "this help"),
    ("←, →, <, >", "sort by the column to the left or right"),
    ("n", "sort by name"),
    ("m", "sort by local memory"),
    ("f", "sort by faults"),
    ("w", "sort by wait"),
    ("s", "sort by stalls"),
    ("r", "reverse the order"),
    ("↑, ↓, PgUp, PgDn, Home", "scroll"),
    ("Space", "ask all backends now"),
];

/// What is shown.
#[derive(Clone, Debug)]
pub struct View {
    /// The guests, in order.
    pub lines: Vec<Line>,
    /// Their order.
    pub sorting: Sorting,
    /// Guests scrolled past.
    pub scrolled: usize,
    /// Whether the help covers the table.
    pub help: bool,
    /// Time between two rounds of questions.
    pub delay: Duration,
    /// Why the guests cannot be listed, if so.
    pub trouble: Option<String>,
}

impl View {
    /// Nothing to show yet.
    pub fn new(sorting: Sorting, delay: Duration) -> Self {
        Self {
            lines: Vec::new(),
            sorting,
            scrolled: 0,
            help: false,
            delay,
            trouble: None,
        }
    }

    /// Shows these guests.
    pub fn show(&mut self, lines: Vec<Line>) {
        self.lines = lines;
        self.sorting.sort(&mut self.lines);
        self.scroll_to(self.scrolled);
    }

    /// Does what a key says.
    pub fn press(&mut self, key: KeyEvent) -> Wish {
        if key.kind == KeyEventKind::Release {
            return Wish::Draw;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && matches!(key.code, KeyCode::Char('c' | 'C')) {
            return Wish::Quit;
        }
        if self.help {
            self.help = false;
            return Wish::Draw;
        }
        match key.code {
            KeyCode::Char('q' | 'Q') | KeyCode::Esc => return Wish::Quit,
            KeyCode::Char(' ') => return Wish::Ask,
            KeyCode::Char('?' | 'h') => self.help = true,
            KeyCode::Left | KeyCode::Char('<') => self.sort_by_neighbour(Column::ALL.len() - 1),
            KeyCode::Right | KeyCode::Char('>') => self.sort_by_neighbour(1),
            KeyCode::Char('n') => self.sort_by(Column::Name),
            KeyCode::Char('m') => self.sort_by(Column::Local),
            KeyCode::Char('f') => self.sort_by(Column::Faults),
            KeyCode::Char('w') => self.sort_by(Column::Wait),
            KeyCode::Char('s') => self.sort_by(Column::Stalls),
            KeyCode::Char('r') => {
                self.sorting.reversed = !self.sorting.reversed;
                self.sorting.sort(&mut self.lines);
            }
            KeyCode::Up => self.scroll_to(self.scrolled.saturating_sub(1)),
            KeyCode::Down => self.scroll_to(self.scrolled + 1),
            KeyCode::PageUp => self.scroll_to(self.scrolled.saturating_sub(PAGE_ROWS)),
            KeyCode::PageDown => self.scroll_to(self.scrolled + PAGE_ROWS),
            KeyCode::Home => self.scroll_to(0),
            _ => {}
        }
        Wish::Draw
    }

    fn scroll_to(&mut self, row: usize) {
        self.scrolled = row.min(self.lines.len().saturating_sub(1));
    }

    fn sort_by(&mut self, column: Column) {
        self.sorting = Sorting {
            by: column,
            reversed: false,
        };
        self.sorting.sort(&mut self.lines);
    }

    fn sort_by_neighbour(&mut self, steps: usize) {
        let now = Column::ALL
            .iter()
            .position(|column| *column == self.sorting.by)
            .unwrap_or_default();
        self.sort_by(Column::ALL[(now + steps) % Column::ALL.len()]);
    }
}
