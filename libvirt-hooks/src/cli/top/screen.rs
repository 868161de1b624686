//! Draws a [`View`]: head, table with sparklines, what is wrong, keys. Columns that the terminal has
//! no room for are left out, the least telling first.

use std::collections::VecDeque;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line as TextLine, Span, Text};
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table};

use super::table::{Column, notes, totals};
use super::view::{KEYS, View};
use super::watcher::Line;
use crate::cli::report::State;

/// Room for a name, before columns are left out for it.
const NAME_WIDTH: u16 = 12;

/// Notes of what is wrong shown at once.
const NOTES_MOST: usize = 4;

/// Shares of waiting from which a guest is slowed noticeably, and badly.
const WAIT_NOTICEABLE: f64 = 0.25;
const WAIT_BAD: f64 = 0.75;

/// How the terminal may be drawn on.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// With colours.
    pub colour: bool,
    /// With characters beyond ASCII.
    pub unicode: bool,
}

impl Terms {
    /// As the environment says: NO_COLOR (see <https://no-color.org>), and the locale's encoding.
    pub fn from_environment() -> Self {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
        let locale = locale.unwrap_or_default().to_lowercase();
        Self {
            colour: set("NO_COLOR").is_none(),
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
        }
    }

    fn coloured(self, colour: Color) -> Style {
        if self.colour {
            Style::new().fg(colour)
        } else {
            Style::new().add_modifier(Modifier::BOLD)
        }
    }
}

/// A column of the screen: one of the table's, or the sparkline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Figures(Column),
    History,
}

/// What is left out first where room is short.
const DISPENSABLE: [Shown; 11] = [
    Shown::Figures(Column::Refaults),
    Shown::Figures(Column::Limit),
    Shown::Figures(Column::Out),
    Shown::Figures(Column::In),
    Shown::Figures(Column::Stalls),
    Shown::Figures(Column::Ram),
    Shown::History,
    Shown::Figures(Column::Remote),
    Shown::Figures(Column::Local),
    Shown::Figures(Column::State),
    Shown::Figures(Column::Faults),
];

impl Shown {
    fn width(self) -> u16 {
        match self {
            Self::History => 16,
            Self::Figures(Column::Name) => NAME_WIDTH,
            Self::Figures(Column::State) => 7,
            // As wide as '1023.9 MiB'.
            Self::Figures(
                Column::Ram
                | Column::Local
                | Column::Limit
                | Column::Remote
                | Column::In
                | Column::Out,
            ) => 10,
            Self::Figures(column) => column.heading().len() as u16,
        }
    }
}

/// The columns that fit.
fn fitting(width: u16) -> Vec<Shown> {
    let mut shown: Vec<Shown> = Column::ALL.map(Shown::Figures).to_vec();
    shown.push(Shown::History);
    let mut dispensable = DISPENSABLE.iter();
    while shown.iter().map(|column| column.width() + 2).sum::<u16>() > width + 2 {
        let Some(least) = dispensable.next() else {
            break;
        };
        shown.retain(|column| column != least);
    }
    shown
}

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, view: &View, terms: Terms) {
    let mut wrong = notes(&view.lines);
    wrong.splice(0..0, view.trouble.clone());
    if wrong.len() > NOTES_MOST {
        let more = wrong.len() + 1 - NOTES_MOST;
        wrong.truncate(NOTES_MOST - 1);
        wrong.push(format!("… and {more} more: see 'outram status'"));
    }
    let [head, table, below, foot] = Layout::vertical([
        Constraint::Length(3),
        Constraint::Min(2),
        Constraint::Length(wrong.len() as u16),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_head(frame, head, view);
    draw_table(frame, table, view, terms);
    let wrong: Vec<TextLine<'_>> = wrong.into_iter().map(TextLine::from).collect();
    frame.render_widget(
        Paragraph::new(wrong).style(terms.coloured(Color::Red)),
        below,
    );
    draw_foot(frame, foot, view);
    if view.help {
        draw_help(frame, terms);
    }
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let guests = match view.lines.len() {
        1 => "1 guest".to_owned(),
        number => format!("{number} guests"),
    };
    let delay = view.delay.as_secs_f64();
    let title = Span::styled("outram top", Style::new().add_modifier(Modifier::BOLD));
    let rest = Span::raw(format!(" - {guests}, every {delay} s"));
    let head = vec![
        TextLine::from(vec![title, rest]),
        TextLine::from(totals(&view.lines)),
    ];
    frame.render_widget(Paragraph::new(head), area);
}

fn draw_table(frame: &mut Frame<'_>, area: Rect, view: &View, terms: Terms) {
    let columns = fitting(area.width);
    let widths = columns.iter().map(|column| match column {
        Shown::Figures(Column::Name) => Constraint::Min(column.width()),
        other => Constraint::Length(other.width()),
    });
    let headings = columns.iter().map(|column| heading(*column, view));
    let heading_style = Style::new().add_modifier(Modifier::REVERSED);
    let rows = view.lines.iter().skip(view.scrolled).map(|line| {
        let cells = columns.iter().map(|column| cell(*column, line, terms));
        Row::new(cells).style(style_of(line, terms))
    });
    let table = Table::new(rows, widths)
        .header(Row::new(headings).style(heading_style))
        .column_spacing(2);
    frame.render_widget(table, area);
    if view.lines.is_empty() && area.height > 2 {
        let below = Rect {
            y: area.y + 2,
            height: 1,
            ..area
        };
        frame.render_widget(Paragraph::new("No domain has a backend."), below);
    }
}

fn heading(column: Shown, view: &View) -> Cell<'static> {
    let Shown::Figures(column) = column else {
        return Cell::from("FAULTS/s SO FAR");
    };
    let mut text = Text::from(column.heading());
    if view.sorting.by == column {
        let arrow = Modifier::BOLD | Modifier::UNDERLINED;
        text = text.style(Style::new().add_modifier(arrow));
    }
    Cell::from(if column.is_text() {
        text
    } else {
        text.right_aligned()
    })
}

fn cell(column: Shown, line: &Line, terms: Terms) -> Cell<'static> {
    match column {
        Shown::History => Cell::from(sparkline(
            &line.history,
            usize::from(column.width()),
            terms.unicode,
        )),
        Shown::Figures(column) if column.is_text() => Cell::from(column.cell(line)),
        Shown::Figures(column) => {
            let text = Text::from(column.cell(line)).right_aligned();
            let share = line.rates.map_or(0.0, |rates| rates.wait_share);
            match column {
                Column::Wait if share >= WAIT_BAD => {
                    Cell::from(text).style(terms.coloured(Color::Red))
                }
                Column::Wait if share >= WAIT_NOTICEABLE => {
                    Cell::from(text).style(terms.coloured(Color::Yellow))
                }
                _ => Cell::from(text),
            }
        }
    }
}

fn style_of(line: &Line, terms: Terms) -> Style {
    match line.report.state {
        State::Serving => Style::new(),
        State::Stalled | State::Recovering | State::Homing | State::Released => {
            terms.coloured(Color::Yellow)
        }
        State::Waiting | State::Ending | State::Off => Style::new().add_modifier(Modifier::DIM),
        State::Stopped | State::Refused | State::Silent | State::Gone | State::Failed => {
            terms.coloured(Color::Red)
        }
    }
}

/// The newest `width` values as bars, the highest of them full.
fn sparkline(values: &VecDeque<f64>, width: usize, unicode: bool) -> String {
    let bars: &[char] = if unicode {
        &['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']
    } else {
        &['_', '.', ':', '-', '=', '+', '*', '#']
    };
    let from = values.len().saturating_sub(width);
    let newest = values.range(from..);
    let highest = newest.clone().copied().fold(0.0, f64::max);
    newest
        .map(|value| {
            let share = if highest > 0.0 { value / highest } else { 0.0 };
            let level = (share * (bars.len() - 1) as f64).ceil() as usize;
            bars[level.min(bars.len() - 1)]
        })
        .collect()
}

fn draw_foot(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let order = if view.sorting.reversed {
        ", reversed"
    } else {
        ""
    };
    let foot = format!(
        "q quit  ? help  < > sort: {}{order}  r reverse  space now",
        view.sorting.by.heading()
    );
    frame.render_widget(
        Paragraph::new(foot).style(Style::new().add_modifier(Modifier::DIM)),
        area,
    );
}

fn draw_help(frame: &mut Frame<'_>, terms: Terms) {
    let keys = KEYS.iter().map(|(keys, what)| {
        let keys = if terms.unicode {
            (*keys).to_owned()
        } else {
            in_ascii(keys)
        };
        TextLine::from(format!(" {keys:<23} {what}"))
    });
    let mut lines: Vec<TextLine<'_>> = keys.collect();
    lines.push(TextLine::default());
    for text in [
        " LOCAL   in this host's memory, staging included",
        " WAIT    time that faults wait, per time: 100% is one",
        "         thread of QEMU (a vCPU, mostly) that always waits",
        " STALLS  waits of faults for room, a huge page or a server",
    ] {
        lines.push(TextLine::from(text));
    }
    let whole = frame.area();
    let area = Rect {
        x: whole.x,
        y: whole.y,
        width: whole.width.min(66),
        height: whole.height.min(lines.len() as u16 + 2),
    };
    frame.render_widget(Clear, area);
    let block = Block::bordered().title(" Keys; any key closes this ");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

fn in_ascii(keys: &str) -> String {
    let mut text = keys.to_owned();
    for (arrow, word) in [("←", "Left"), ("→", "Right"), ("↑", "Up"), ("↓", "Down")] {
        text = text.replace(arrow, word);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparkline_ends_with_the_newest_and_is_full_at_the_highest() {
        let values: VecDeque<f64> = [9.0, 0.0, 1.0, 2.0, 4.0].into();
        assert_eq!(sparkline(&values, 4, true), "▁▃▅█");
        assert_eq!(sparkline(&values, 9, false), "#_.:=");
        assert_eq!(sparkline(&VecDeque::new(), 9, true), "");
        assert_eq!(sparkline(&[0.0, 0.0].into(), 9, true), "▁▁");
    }

    #[test]
    fn a_narrow_terminal_keeps_the_telling_columns() {
        assert_eq!(fitting(200).len(), 13);
        let eighty = fitting(80);
        for column in [
            Column::Name,
            Column::State,
            Column::Local,
            Column::Faults,
            Column::Wait,
        ] {
            assert!(eighty.contains(&Shown::Figures(column)), "{column:?}");
        }
        assert_eq!(
            fitting(5),
            [Shown::Figures(Column::Name), Shown::Figures(Column::Wait)]
        );
    }
}
