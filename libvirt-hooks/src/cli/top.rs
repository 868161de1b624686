//! `outram top`: all guests of this host, again and again.
//!
//! On a terminal a table that is redrawn and listens to keys ([`screen`], [`view`]); elsewhere, and
//! with `--batch`, plain reports one after another. Only backends are asked ([`watcher`]), never
//! libvirt or its monitor, so it works while guests stand still.

pub mod rates;
pub mod screen;
pub mod table;
pub mod view;
pub mod watcher;

use std::io::{IsTerminal, stdin, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::output::{self, now_in_words, parse_delay};
use crate::host::Paths;
use screen::Terms;
use table::{Column, Sorting};
use view::{View, Wish};
use watcher::Watcher;

/// How long keys and answers are waited for at once: the screen is at most so late.
const TICK: Duration = Duration::from_millis(100);

/// When the second round follows the first at the latest: before it there are no rates.
const FIRST_DELAY: Duration = Duration::from_millis(500);

/// The arguments of `outram top`.
#[derive(Debug, Args)]
pub struct TopArguments {
    /// Seconds between two looks, 0.1 or more
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = parse_delay)]
    delay: Duration,
    /// The column to sort by
    #[arg(
        short,
        long,
        value_name = "COLUMN",
        default_value = "wait",
        hide_possible_values = true,
        help = "The column to sort by: name, state, ram, local, limit, remote, faults, refaults, wait, in, out or stalls"
    )]
    sort: Column,
    /// The smallest first, or from Z to A
    #[arg(short, long)]
    reverse: bool,
    /// Print reports one after another; the usual where output or input is no terminal
    #[arg(short, long)]
    batch: bool,
    /// End after so many reports
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
}

impl TopArguments {
    /// Shows the table until it is left.
    pub fn run(&self, paths: &Paths) -> Result<bool> {
        let mut watcher = Watcher::new(paths);
        // Before the screen is taken: a host that cannot be looked at is told on a usual line.
        watcher.ask()?;
        if self.batch || !stdout().is_terminal() || !stdin().is_terminal() {
            self.print(&mut watcher)?;
        } else {
            self.show(&mut watcher)?;
        }
        Ok(true)
    }

    fn sorting(&self) -> Sorting {
        Sorting {
            by: self.sort,
            reversed: self.reverse,
        }
    }

    /// Prints reports; each of the time since the one before, so the first comes after one delay.
    fn print(&self, watcher: &mut Watcher) -> Result<()> {
        watcher.hear_all();
        let mut reports = 0;
        while self.iterations.is_none_or(|wanted| reports < wanted) {
            thread::sleep(self.delay);
            watcher.ask()?;
            watcher.hear_all();
            let mut lines = watcher.lines();
            self.sorting().sort(&mut lines);
            let gap = if reports > 0 { "\n" } else { "" };
            let text = format!(
                "{gap}outram top - {}, guests: {}\n{}\n\n{}",
                now_in_words(),
                lines.len(),
                table::totals(&lines),
                table::plain(&lines)
            );
            if !output::write(&text)? {
                return Ok(());
            }
            reports += 1;
        }
        Ok(())
    }

    fn show(&self, watcher: &mut Watcher) -> Result<()> {
        let ended = Arc::new(AtomicBool::new(false));
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&ended)).context("signal handlers")?;
        }
        let mut terminal = ratatui::try_init().context("this terminal cannot be drawn on")?;
        let result = self.redraw(watcher, &mut terminal, &ended);
        ratatui::restore();
        result
    }

    /// Draws whenever something has changed, until a key or a signal ends it.
    fn redraw(
        &self,
        watcher: &mut Watcher,
        terminal: &mut DefaultTerminal,
        ended: &AtomicBool,
    ) -> Result<()> {
        let terms = Terms::from_environment();
        let mut view = View::new(self.sorting(), self.delay);
        let mut next = Instant::now() + self.delay.min(FIRST_DELAY);
        let mut rounds = 0;
        let mut changed = true;
        while !ended.load(Ordering::Relaxed) {
            if changed {
                terminal.draw(|frame| screen::draw(frame, &view, terms))?;
            }
            let wish = self.next_wish(&mut view)?;
            changed = wish.is_some();
            if wish == Some(Wish::Quit) {
                return Ok(());
            }
            if wish == Some(Wish::Ask) || Instant::now() >= next {
                rounds += 1;
                if self.iterations.is_some_and(|wanted| rounds > wanted) {
                    return Ok(());
                }
                // What fails now may work in the next round; the table stays as it was.
                view.trouble = watcher.ask().err().map(|error| format!("{error:#}"));
                next = Instant::now() + self.delay;
                changed = true;
            }
            if watcher.hear() || changed {
                view.show(watcher.lines());
                changed = true;
            }
        }
        Ok(())
    }

    /// Waits a moment for a key or another size of the terminal.
    fn next_wish(&self, view: &mut View) -> Result<Option<Wish>> {
        if !event::poll(TICK).context("reading the terminal")? {
            return Ok(None);
        }
        Ok(match event::read().context("reading the terminal")? {
            Event::Key(key) => Some(view.press(key)),
            Event::Resize(..) => Some(Wish::Draw),
            _ => None,
        })
    }
}
