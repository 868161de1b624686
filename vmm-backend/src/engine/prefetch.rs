//! Which pages to fetch before the guest asks for them: those that follow where it goes through its
//! memory in order, up or down, at any stride.
//!
//! A *stream* is a place where the guest faulted, and where it is expected next. A page fetched ahead
//! raises no fault, so a stream goes on when the guest faults right behind what was fetched for it: that
//! was right, and the next window is twice as large. Faults that fit no stream start one of their own in
//! place of the one that has rested longest, for threads of a guest go through several arrays at once.
//! The more windows end without a fault behind them, the longer a stream has to prove itself first.
//!
//! Objects that lie across two pages have both faulted on, one after the other, wherever they are. So behind a fault
//! that fits no stream its neighbour is fetched, as long as neighbours were next often enough lately. Some of these
//! faults bring nothing: they show how often that is.
//!
//! Nor does a fault that fits no stream say more where others know what to fetch with its page
//! ([`policy`](super::policy) does, of pages that left together): it is told what of that lies behind the page, and
//! whoever faults behind that may go through memory in order.
//!
//! The windows are the kernel's readahead's; streams that are told apart by where they are, and strides,
//! are those of hardware prefetchers. Leap (Al Maruf and Chowdhury, ATC 2020) votes on strides over
//! all faults instead, which interleaved streams of different strides defeat.
//!
//! Where several pages are moved together, these blocks are what is counted in here, in place of pages.

use super::PageIndex;
use super::pace::block_of;

/// Streams followed at once: more than a guest's few busy threads have.
const STREAMS: usize = 8;

/// Pages of a stream's first window; each further one is twice as large.
const FIRST_WINDOW: u32 = 4;

/// How far from a stream's last fault another is taken for its next, in pages.
const NEAR: i64 = 32;

/// Most faults that a stream must go on for by itself, however often windows were wrong.
const DOUBT_MOST: u32 = 16;

/// Of faults that fit no stream, one in so many brings nothing.
const PAIR_SAMPLES: u64 = 8;

/// The share of those whose neighbour was next, from which on neighbours are fetched: one that is not needed costs a
/// third of what one saves that is.
const PAIR_LEAST: f32 = 0.3;

/// What one of them counts against all before.
const PAIR_WEIGHT: f32 = 1.0 / 32.0;

/// Pages to fetch: `first + stride`, `first + 2 * stride` and so on, `count` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The page that was faulted on.
    first: i64,
    stride: i64,
    count: u32,
    /// Pages of a block, in which all of these count.
    granule: u32,
}

impl Window {
    /// The pages in the order in which they are expected to be needed.
    pub fn pages(self) -> impl Iterator<Item = PageIndex> {
        let block = move |step: i64| {
            let number = u32::try_from(self.first + step * self.stride).ok()?;
            let first = PageIndex(number.checked_mul(self.granule)?);
            Some(block_of(first, self.granule).pages())
        };
        (1..=i64::from(self.count)).map_while(block).flatten()
    }
}

/// What a fault says of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// The guest has gone through these since: it faulted behind them.
    pub passed: Option<Window>,
    /// To be fetched behind the page that it faulted on.
    pub next: Option<Window>,
    /// That is its neighbour, which may come by the same request.
    pub is_pair: bool,
    /// It fits no stream that says what comes next.
    pub is_single: bool,
}

/// Why there is a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Reason {
    /// It lies where a stream goes.
    #[default]
    Stream,
    /// It is the neighbour of a fault that fitted no stream.
    Neighbour,
    /// It is what was fetched with the page of such a fault, for other reasons.
    Together,
}

/// Where the guest goes through its memory in order.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// The page of its last fault.
    last: i64,
    /// From one fault to the next; 0 where only one is known.
    stride: i64,
    /// Faults in a row that had this stride, and no window.
    proven: u32,
    /// Pages of the last window; 0 before the first.
    window: u32,
    /// Why there is that.
    reason: Reason,
    /// When it last went on, by the count of faults; 0 is never used.
    used: u64,
}

/// The streams of a shard.
#[derive(Debug)]
pub struct Prefetch {
    streams: [Stream; STREAMS],
    faults: u64,
    /// Of which so many fitted no stream.
    singles: u64,
    /// Windows that were wrong lately, beyond those that were right.
    doubt: u32,
    /// Of faults that fitted no stream lately, and brought nothing, the share whose neighbour was next.
    pairs: f32,
    /// Most pages of a window; less than a block fetches nothing ahead.
    most_pages: u32,
    /// Pages of a block.
    granule: u32,
}

impl Prefetch {
    /// No stream yet; at most `most_pages` ahead of one, where `granule` pages are moved together.
    pub fn new(most_pages: u32, granule: u32) -> Self {
        Self {
            streams: Default::default(),
            faults: 0,
            singles: 0,
            doubt: 0,
            pairs: 0.0,
            most_pages,
            granule,
        }
    }

    /// Fetches at most so many pages ahead from now on; begins anew where another number of them is moved
    /// together.
    pub(super) fn follow(&mut self, most_pages: u32, granule: u32) {
        self.most_pages = most_pages;
        if granule != self.granule {
            *self = Self::new(most_pages, granule);
        }
    }

    /// Most blocks of a window.
    fn most(&self) -> u32 {
        self.most_pages / self.granule
    }

    fn block_number(&self, page: PageIndex) -> i64 {
        i64::from(page.0 / self.granule)
    }

    /// Notes a fault on a page that lies elsewhere.
    pub fn note(&mut self, page: PageIndex) -> Noted {
        let page = self.block_number(page);
        // Where a stream is already, another page of the same block says nothing new.
        if self.most() == 0 || self.streams.iter().any(|stream| stream.is_at(page)) {
            return Noted::default();
        }
        self.faults += 1;
        let found = self.streams.iter().position(|stream| stream.goes_on(page));
        let near = || self.streams.iter().position(|stream| stream.is_near(page));
        match found.or_else(near) {
            Some(number) => self.go_on(number, page),
            None => self.start(page),
        }
    }

    /// Notes that the guest waits for a page which is on its way. Where that is all of a window (a huge page, or
    /// as many as are moved together), the next one is to be asked for by now: behind it, the wire would be idle
    /// until it is in place. Of smaller pages dozens are on their way, and to ask for more amid them was no faster.
    pub fn note_caught_up(&mut self, page: PageIndex) -> Option<Noted> {
        if self.most() != 1 {
            return None;
        }
        let page = self.block_number(page);
        let is_there = |stream: &Stream| stream.window == 1 && page == stream.last + stream.stride;
        let number = self.streams.iter().position(is_there)?;
        self.faults += 1;
        Some(self.go_on(number, page))
    }

    /// Whether neighbours were next often enough lately.
    pub(super) fn fetches_neighbours(&self) -> bool {
        // Of blocks that are large, one costs as much ahead as when it is waited for.
        self.pairs >= PAIR_LEAST && self.most() >= FIRST_WINDOW
    }

    fn start(&mut self, page: i64) -> Noted {
        self.singles += 1;
        let is_sample = self.singles.is_multiple_of(PAIR_SAMPLES);
        let is_pair = self.fetches_neighbours() && !is_sample;
        let granule = self.granule;
        let Some(stream) = self.streams.iter_mut().min_by_key(|stream| stream.used) else {
            return Noted::default();
        };
        let before = std::mem::replace(
            stream,
            Stream {
                last: page,
                stride: i64::from(is_pair),
                window: u32::from(is_pair),
                reason: match is_pair {
                    true => Reason::Neighbour,
                    false => Reason::Stream,
                },
                used: self.faults,
                ..Stream::default()
            },
        );
        let next = is_pair.then(|| stream.window_of(1, granule));
        if before.window > 0 && before.reason == Reason::Stream {
            self.doubt = (self.doubt + 1).min(DOUBT_MOST);
        }
        if before.is_lone() {
            self.note_pair(false);
        }
        Noted {
            passed: None,
            next,
            is_pair,
            is_single: true,
        }
    }

    /// Notes that with a page which was faulted on just now, and fits no stream that says what comes next, so many come
    /// that follow it.
    pub fn note_together(&mut self, page: PageIndex, behind: u32) {
        let page = self.block_number(page);
        let stream = self.streams.iter_mut().find(|stream| stream.is_at(page));
        if let Some(stream) = stream.filter(|_| behind > 0) {
            stream.stride = 1;
            stream.window = behind;
            stream.reason = Reason::Together;
        }
    }

    /// Notes whether the fault behind one that fitted no stream was on its neighbour.
    fn note_pair(&mut self, was_next: bool) {
        self.pairs += (f32::from(u8::from(was_next)) - self.pairs) * PAIR_WEIGHT;
    }

    fn go_on(&mut self, number: usize, page: i64) -> Noted {
        let (most, doubt, granule) = (self.most(), self.doubt, self.granule);
        if self.streams[number].is_lone() {
            self.note_pair(page == self.streams[number].last + 1);
        }
        let stream = &mut self.streams[number];
        stream.used = self.faults;
        let went_on = stream.goes_on(page);
        let passed = stream.before(page).filter(|_| went_on);
        let passed = passed.map(|count| stream.window_of(count, granule));
        let reason = std::mem::take(&mut stream.reason);
        if went_on && stream.window > 0 && reason != Reason::Together {
            self.doubt = doubt.saturating_sub(1);
            stream.window = (stream.window * 2).min(most);
        } else {
            if stream.window > 0 && reason == Reason::Stream {
                self.doubt = (doubt + 1).min(DOUBT_MOST);
            }
            stream.proven = if went_on { stream.proven + 1 } else { 0 };
            stream.stride = match went_on {
                true => stream.stride,
                false => page - stream.last,
            };
            // Two faults side by side say as much as three further apart.
            let sure = stream.proven + u32::from(stream.stride.abs() == 1) > doubt;
            stream.window = if sure { FIRST_WINDOW.min(most) } else { 0 };
        }
        stream.last = page;
        let next = (stream.window > 0).then(|| stream.window_of(stream.window, granule));
        Noted {
            passed,
            next,
            is_pair: false,
            is_single: went_on && reason == Reason::Together && next.is_none(),
        }
    }
}

impl Stream {
    /// Whether a fault is behind what was fetched for it, where it was expected: right behind, or a few
    /// pages further where those between did not have to be fetched. Also within, where some were not
    /// fetched for want of room.
    fn goes_on(&self, page: i64) -> bool {
        if self.used == 0 || self.stride == 0 {
            return false;
        }
        let (distance, window) = (page - self.last, i64::from(self.window));
        let steps = distance / self.stride;
        distance % self.stride == 0 && steps > 0 && steps <= 2 * window + 1
    }

    /// Whether a single fault is all that is known of it, and nothing was fetched behind that.
    fn is_lone(&self) -> bool {
        self.used > 0 && self.stride == 0
    }

    /// How many of the last window's pages are before a page at which the stream goes on, if any.
    fn before(&self, page: i64) -> Option<u32> {
        let steps = (page - self.last).checked_div(self.stride)?;
        let count = u32::try_from(steps - 1).ok()?.min(self.window);
        (count > 0).then_some(count)
    }

    /// The first `count` pages behind its last fault.
    fn window_of(&self, count: u32, granule: u32) -> Window {
        Window {
            first: self.last,
            stride: self.stride,
            count,
            granule,
        }
    }

    fn is_at(&self, page: i64) -> bool {
        self.used > 0 && page == self.last
    }

    fn is_near(&self, page: i64) -> bool {
        self.used > 0 && (page - self.last).abs() <= NEAR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u32 = 64;

    /// Faults of a guest that finds what was fetched ahead, and how many pages were fetched so.
    fn walk(prefetch: &mut Prefetch, pages: impl Iterator<Item = u32>) -> (usize, usize) {
        let mut there = std::collections::HashSet::new();
        let (mut faults, mut fetched) = (0, 0);
        for page in pages {
            if there.contains(&page) {
                continue;
            }
            faults += 1;
            if let Some(window) = prefetch.note(PageIndex(page)).next {
                fetched += window.pages().count();
                there.extend(window.pages().map(|page| page.0));
            }
        }
        (faults, fetched)
    }

    #[test]
    fn memory_read_in_order_is_faulted_on_once_a_window() {
        let (faults, fetched) = walk(&mut Prefetch::new(MOST, 1), 100..10_100);
        assert!(faults < 10_000 / 60 + 10, "{faults} faults");
        assert!(fetched <= 10_000 + MOST as usize, "{fetched} fetched");
    }

    #[test]
    fn memory_read_backwards_and_in_strides_is_fetched_ahead_too() {
        let (faults, _) = walk(&mut Prefetch::new(MOST, 1), (0..10_000).rev());
        assert!(faults < 10_000 / 60 + 10, "{faults} faults backwards");
        let strides = (0..10_000).map(|step| step * 7);
        let (faults, fetched) = walk(&mut Prefetch::new(MOST, 1), strides);
        assert!(faults < 10_000 / 60 + 10, "{faults} faults in strides");
        assert!(fetched <= 10_000 + MOST as usize, "{fetched} fetched");
    }

    #[test]
    fn streams_that_alternate_are_told_apart() {
        let starts = [0, 100_000, 200_000, 300_000];
        let mixed = (0..2_000).flat_map(|step| starts.map(|start| start + step));
        let (faults, _) = walk(&mut Prefetch::new(MOST, 1), mixed);
        assert!(faults < 4 * (2_000 / 60 + 10), "{faults} faults");
    }

    #[test]
    fn next_to_nothing_is_fetched_for_random_faults() {
        let mut random = 1_u64;
        let pages = std::iter::repeat_with(|| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            (random >> 33) as u32 % 100_000
        });
        let (faults, fetched) = walk(&mut Prefetch::new(MOST, 1), pages.take(20_000));
        assert!(fetched * 50 < faults, "{fetched} pages for {faults} faults");
    }

    /// Pages two by two, `distance` apart, at random places.
    fn pairs(distance: u32) -> impl Iterator<Item = u32> {
        let mut random = 1_u64;
        (0..5_000).flat_map(move |_| {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1);
            let page = (random >> 33) as u32 % 1_000_000;
            [page, page + distance]
        })
    }

    /// They look like the beginnings of streams.
    #[test]
    fn windows_that_are_wrong_again_and_again_are_given_up() {
        let (faults, fetched) = walk(&mut Prefetch::new(MOST, 1), pairs(2));
        assert!(fetched * 20 < faults, "{fetched} pages for {faults} faults");
    }

    #[test]
    fn the_second_of_two_neighbours_comes_with_the_first() {
        let (faults, fetched) = walk(&mut Prefetch::new(MOST, 1), pairs(1));
        // Seven in eight of them, and a few more at first.
        assert!(faults < 5_000 + 5_000 / 6, "{faults} faults");
        assert!(fetched < 5_000, "{fetched} pages fetched");
        // Not where a block is as long on its way as a page that is waited for.
        let (faults, _) = walk(&mut Prefetch::new(MOST, MOST / 2), pairs(MOST / 2));
        assert!(faults > 9_000, "{faults} faults");
        let mut huge = Prefetch::new(1, 1);
        assert!(!pairs(1).any(|page| huge.note(PageIndex(page)).is_pair));
    }

    #[test]
    fn pages_that_need_not_be_fetched_do_not_end_a_stream() {
        let mut prefetch = Prefetch::new(MOST, 1);
        assert_eq!(prefetch.note(PageIndex(10)).next, None);
        assert!(prefetch.note(PageIndex(11)).next.is_some());
        // 12 to 15 were fetched, 16 and 17 were there.
        let window = prefetch
            .note(PageIndex(18))
            .next
            .expect("the stream goes on");
        assert_eq!(window.pages().next(), Some(PageIndex(19)));
        assert_eq!(window.pages().count(), 8);
    }

    #[test]
    fn a_fault_behind_a_window_says_which_pages_were_passed() {
        let mut prefetch = Prefetch::new(MOST, 1);
        let mut passed = |page| {
            let passed = prefetch.note(PageIndex(page)).passed;
            let pages = passed.into_iter().flat_map(Window::pages);
            pages.map(|page| page.0).collect::<Vec<_>>()
        };
        assert_eq!(passed(10), [0; 0]);
        assert_eq!(passed(11), [0; 0], "there was no window yet");
        assert_eq!(passed(16), [12, 13, 14, 15]);
        // Of the eight behind that, some did not come.
        assert_eq!(passed(20), [17, 18, 19]);
        assert_eq!(passed(22), [21]);
        assert_eq!(passed(100), [0; 0], "it is not known to have got there");
    }

    #[test]
    fn windows_of_one_page_follow_each_other_while_the_guest_waits_for_them() {
        let behind = |noted: Option<Noted>| {
            let pages = noted
                .and_then(|noted| noted.next)
                .into_iter()
                .flat_map(Window::pages);
            pages.map(|page| page.0).collect::<Vec<_>>()
        };
        let mut prefetch = Prefetch::new(1, 1);
        assert_eq!(behind(Some(prefetch.note(PageIndex(10)))), [0; 0]);
        assert_eq!(behind(Some(prefetch.note(PageIndex(11)))), [12]);
        assert_eq!(behind(prefetch.note_caught_up(PageIndex(12))), [13]);
        assert_eq!(behind(prefetch.note_caught_up(PageIndex(13))), [14]);
        assert_eq!(
            behind(prefetch.note_caught_up(PageIndex(13))),
            [0; 0],
            "again"
        );
        assert_eq!(behind(prefetch.note_caught_up(PageIndex(40))), [0; 0]);
        // Of several, the rest is on its way.
        let mut prefetch = Prefetch::new(2, 1);
        assert_eq!(behind(Some(prefetch.note(PageIndex(10)))), [0; 0]);
        assert_eq!(behind(Some(prefetch.note(PageIndex(11)))), [12, 13]);
        assert_eq!(behind(prefetch.note_caught_up(PageIndex(12))), [0; 0]);
    }

    #[test]
    fn a_fault_behind_what_came_with_a_single_one_may_begin_a_stream() {
        let mut prefetch = Prefetch::new(MOST, 1);
        let noted = prefetch.note(PageIndex(80));
        assert!(noted.is_single && noted.next.is_none());
        prefetch.note_together(PageIndex(80), 7);
        let noted = prefetch.note(PageIndex(88));
        assert!(!noted.is_single);
        let window = noted.next.expect("it goes on");
        assert_eq!(window.pages().count(), FIRST_WINDOW as usize);
        assert_eq!(window.pages().next(), Some(PageIndex(89)));
        // Where streams end early, a single fault in the next block says nothing more.
        let mut prefetch = Prefetch::new(MOST, 1);
        prefetch.doubt = DOUBT_MOST / 2;
        for block in 0..4 {
            let page = PageIndex(2_000_000 + 8 * block);
            let noted = prefetch.note(page);
            assert!(
                noted.is_single && noted.next.is_none(),
                "{block}: {noted:?}"
            );
            prefetch.note_together(page, 7);
        }
        // No wrong window it was, either.
        let doubt = prefetch.doubt;
        for place in 0..STREAMS as u32 {
            prefetch.note(PageIndex(3_000_000 + 1000 * place));
        }
        assert_eq!(prefetch.doubt, doubt);
    }

    #[test]
    fn a_window_ends_at_the_first_page() {
        let mut prefetch = Prefetch::new(MOST, 1);
        assert_eq!(prefetch.note(PageIndex(3)).next, None);
        let window = prefetch.note(PageIndex(2)).next.expect("two side by side");
        let pages: Vec<_> = window.pages().collect();
        assert_eq!(pages, [PageIndex(1), PageIndex(0)]);
    }
}
