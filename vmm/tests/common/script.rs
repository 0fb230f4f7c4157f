//! A tiny guest that does what a list of steps says, so that a test can be a driver without being a program.

/// Guest-physical address of the first word of the VM generation id: it changes with every restore.
pub(crate) const GENERATION: u32 = 0xd_f000;

/// Runs the steps that follow it in memory: four words each, number of the step and its operands. An unknown number ends it.
const INTERPRETER: [u8; 129] = [
    0x48, 0x8d, 0x35, 0x7a, 0x00, 0x00, 0x00, // lea rsi, [rip + steps]
    0x8b, 0x06, // next: mov eax, [rsi]
    0x8b, 0x7e, 0x04, // mov edi, [rsi + 4]
    0x8b, 0x5e, 0x08, // mov ebx, [rsi + 8]
    0x8b, 0x4e, 0x0c, // mov ecx, [rsi + 12]
    0x48, 0x83, 0xc6, 0x10, // add rsi, 16
    0x85, 0xc0, 0x74, 0x1c, // test eax, eax; jz store
    0xff, 0xc8, 0x74, 0x1c, // dec eax; jz fill
    0xff, 0xc8, 0x74, 0x27, // dec eax; jz check
    0xff, 0xc8, 0x74, 0x34, // dec eax; jz await
    0xff, 0xc8, 0x74, 0x36, // dec eax; jz note
    0xff, 0xc8, 0x74, 0x37, // dec eax; jz changed
    0xff, 0xc8, 0x74, 0x46, // dec eax; jz print
    0xfa, 0xf4, 0xeb, 0xfc, // idle: cli; hlt; jmp idle
    0x89, 0x1f, 0xeb, 0xcd, // store: mov [rdi], ebx; jmp next
    0x89, 0x1f, // fill: mov [rdi], ebx
    0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add rdi, 4096
    0xff, 0xc9, 0x75, 0xf3, // dec ecx; jnz fill
    0xeb, 0xbe, // jmp next
    0x39, 0x1f, 0x75, 0x1f, // check: cmp [rdi], ebx; jne wrong
    0x48, 0x81, 0xc7, 0x00, 0x10, 0x00, 0x00, // add rdi, 4096
    0xff, 0xc9, 0x75, 0xf1, // dec ecx; jnz check
    0xeb, 0xad, // jmp next
    0x39, 0x1f, 0x75, 0xfc, 0xeb, 0xa7, // await: cmp [rdi], ebx; jne await; jmp next
    0x44, 0x8b, 0x07, 0xeb, 0xa2, // note: mov r8d, [rdi]; jmp next
    0x44, 0x39, 0x07, 0x74, 0xfb, 0xeb, 0x9b, // changed: cmp [rdi], r8d; je changed; jmp next
    0x66, 0xba, 0xf8, 0x03, // wrong: mov dx, 0x3f8
    0xb0, 0x58, 0xee, // mov al, 'X'; out dx, al
    0xb0, 0x0a, 0xee, // mov al, '\n'; out dx, al
    0xeb, 0xba, // jmp idle
    0x66, 0xba, 0xf8, 0x03, // print: mov dx, 0x3f8
    0x88, 0xd8, 0xee, 0xeb, 0x86, // mov al, bl; out dx, al; jmp next
];

/// Steps of a guest, each appended to those before it. Addresses are guest-physical.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script(Vec<[u32; 4]>);

impl Script {
    /// The guest's code: the steps in order, then it stands still.
    pub(crate) fn code(&self) -> Vec<u8> {
        let end = [u32::MAX; 4];
        let words = self.0.iter().chain([&end]).flatten();
        let steps = words.flat_map(|word| word.to_le_bytes());
        INTERPRETER.into_iter().chain(steps).collect()
    }

    fn step(&mut self, step: [u32; 4]) -> &mut Self {
        self.0.push(step);
        self
    }

    /// Writes a word.
    pub(crate) fn store(&mut self, address: u32, value: u32) -> &mut Self {
        self.step([0, address, value, 0])
    }

    /// Writes a word to the start of each of some pages.
    pub(crate) fn fill(&mut self, address: u32, value: u32, pages: u32) -> &mut Self {
        self.step([1, address, value, pages])
    }

    /// Prints `X` and stops unless the word at the start of each of some pages is this.
    pub(crate) fn check(&mut self, address: u32, value: u32, pages: u32) -> &mut Self {
        self.step([2, address, value, pages])
    }

    /// Waits until a word is this.
    pub(crate) fn wait_for(&mut self, address: u32, value: u32) -> &mut Self {
        self.step([3, address, value, 0])
    }

    /// Prints a line of one letter, then waits for a restore.
    pub(crate) fn wait_for_fork(&mut self, letter: char) -> &mut Self {
        self.step([4, GENERATION, 0, 0]);
        self.print(letter);
        self.step([5, GENERATION, 0, 0])
    }

    /// Prints a line of one letter.
    pub(crate) fn print(&mut self, letter: char) -> &mut Self {
        self.step([6, 0, u32::from(letter), 0]);
        self.step([6, 0, u32::from('\n'), 0])
    }
}
